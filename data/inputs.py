"""Input files as batches of lines or rows, read in a stream, with positions from which reading can go on.

JSONL comes as lines of bytes; text and Markdown as documents, each a whole file or what stands between separators; both gzipped,
too, by their names. Parquet comes as rows, of which only columns that mean something are read; where they are prompts alone, all.
A position is {"file", "offset", "number"}: the file's place among the inputs, bytes (of a gzipped file: unpacked) or rows before
it, and lines or rows, for messages.
"""

import gzip
import os
import re
import stat
import zlib
from dataclasses import dataclass

import records

BATCH_BYTES, BATCH_ROWS = 1 << 19, 512
TEXT = re.compile(r"\.(txt|md|markdown)(\.gz)?$", re.I)
NOT_READ = re.compile(r"\.(zst|xz|bz2|zip|7z|tar|tgz|csv|tsv|arrow|feather|pdf|docx|html?|xml|bin|safetensors|gguf|npy)$", re.I)
START = {"file": 0, "offset": 0, "number": 0}


class InputFailure(Exception):
    """A file that cannot be read, in one line that begins with its name."""


@dataclass
class Batch:
    file: str
    rows: list  # (line or row number, bytes or object)
    size: int  # bytes, about
    end: dict  # the position behind it
    done: int  # bytes of all inputs read so far, for the progress bar


def is_parquet(path):
    return path.endswith((".parquet", ".pq"))


def identity(path):
    """Size, time and first bytes of a file: they tell whether it is still the same."""
    if NOT_READ.search(path):
        raise InputFailure(f"{path}: is nothing that is read here; give JSONL, .txt or .md (plain or .gz), or Parquet")
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise InputFailure(f"{path}: is not a regular file, in which one can go back and go on; write it into one")
        with open(path, "rb") as file:
            head = zlib.crc32(file.read(1 << 16))
    except OSError as error:
        raise InputFailure(f"{path}: cannot be read: {error.strerror}") from None
    return {"path": path, "bytes": status.st_size, "modified": status.st_mtime_ns, "head": head}


def batches(paths, position, separator=None, name="auto"):
    """Every batch behind `position`, in order. `separator`: the line between documents of a text, b"" a blank one; None: there is
    none. `name`: the format."""
    sizes = [os.path.getsize(path) for path in paths]
    for i in range(position["file"], len(paths)):
        begin = position if i == position["file"] else START
        found = parquet_batches(paths[i], begin, name) if is_parquet(paths[i]) else line_batches(paths[i], begin, separator)
        for batch in found:
            batch.end["file"] = i
            batch.done = sum(sizes[:i]) + min(int(batch.done), sizes[i])
            yield batch


def json_rows(file, offset, number, _):
    """(its first line, its bytes, the bytes and lines of the file behind it) for every line"""
    for line in file:
        offset, number = offset + len(line), number + 1
        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, offset, number


def text_rows(file, offset, number, separator):
    """The same for every document."""
    lines, first = [], number + 1
    for _, line, offset, number in json_rows(file, offset, number, None):
        if line.strip() != separator:
            lines.append(line)
            continue
        yield first, records.Text(b"".join(lines).strip(b"\r\n")), offset, number
        lines, first = [], number + 1
    yield first, records.Text(b"".join(lines).strip(b"\r\n")), offset, number


def line_batches(path, begin, separator):
    offset, number, rows, size = begin["offset"], begin["number"], [], 0
    zipped = path.endswith(".gz")

    def batch():
        return Batch(path, rows, size, {"offset": offset, "number": number}, raw.tell() if zipped else offset)

    try:
        with open(path, "rb") as raw, gzip.GzipFile(fileobj=raw) if zipped else raw as file:
            file.seek(offset)
            for first, row, offset, number in (text_rows if TEXT.search(path) else json_rows)(file, offset, number, separator):
                if row.strip():
                    rows.append((first, row))
                    size += len(row)
                if size >= BATCH_BYTES or len(rows) >= BATCH_ROWS:
                    yield batch()
                    rows, size = [], 0
            if rows:
                yield batch()
    except (OSError, EOFError, zlib.error) as error:
        raise InputFailure(f"{path}:{number + 1}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parquet_batches(path, begin, name):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputFailure(f"{path}: Parquet needs pyarrow: pip install pyarrow") from None
    row, total = begin["offset"], os.path.getsize(path)
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names = file.schema_arrow.names
            alone = "prompt" in names and (name == "prompts" or name == "auto" and not set(names) & set(records.BESIDE_NO_PROMPT))
            columns = [column for column in names if alone or column in records.COLUMNS + records.UNUSED]
            unread = dict.fromkeys([column for column in names if column not in columns], records.Unread())
            if not set(columns) & set(records.COLUMNS):
                raise InputFailure(f"{path}: none of its columns ({', '.join(names[:4])}) is read; "
                                   "rename them to text, messages, prompt, ... (data/README.md)")
            all_rows, group_begin = file.metadata.num_rows, 0
            for group in range(file.num_row_groups):
                group_end = group_begin + file.metadata.row_group(group).num_rows
                skip = max(row - group_begin, 0)
                if row < group_end:
                    for piece in parquet_pieces(file, group, columns, skip):
                        rows = [(row + i + 1, {**record, **unread}) for i, record in enumerate(piece.to_pylist())]
                        row += len(rows)
                        yield Batch(path, rows, piece.nbytes, {"offset": row, "number": row}, total * row / all_rows)
                group_begin = group_end
    except InputFailure:
        raise
    except Exception as error:  # such as a time that Python has no value for
        raise InputFailure(f"{path}: row {row + 1}: cannot be read: {' '.join(str(error).split())}") from None


def parquet_pieces(file, group, columns, skip):
    """Row batches of a row group without its first `skip` rows, none much above BATCH_BYTES unless one row is."""
    for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        batch, skip = batch.slice(skip), 0
        step = max(1, BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1))
        for at in range(0, batch.num_rows, step):
            yield batch.slice(at, step)
