"""Input files as batches of rows, read in a stream, with positions from which reading can go on.

JSON comes as lines of bytes, or as the objects of one array; CSV as rows of texts; a text as documents, the whole file or what stands
between separators; all of these gzipped, too, by their names. Parquet and Arrow come as rows, of which only columns that mean something
are read; where they are prompts alone, all. A position is {"file", "offset", "number"}: the file's place among the inputs, bytes (of a
gzipped file: unpacked) or rows before it, and lines or rows, for messages.
"""

import codecs
import collections
import csv
import gzip
import io
import json
import os
import re
import shlex
import stat
import zlib
from dataclasses import dataclass

import records

BATCH_BYTES, BATCH_ROWS = 1 << 19, 512
HEAD = 1 << 16  # bytes by which a file is known
READERS = {  # of each suffix how a file is read
    **dict.fromkeys(("jsonl", "json", "ndjson"), "json"), **dict.fromkeys(("txt", "md", "markdown"), "text"), "csv": "csv", "tsv": "csv",
    "parquet": "parquet", "pq": "parquet", "arrow": "arrow", "feather": "arrow"}
NO_TEXT = re.compile(r"\.(zst|xz|bz2|zip|7z|tar|tgz|pdf|docx|xlsx|bin|safetensors|gguf|npy|npz|pkl|pt)$", re.I)
ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # which hold no data
BOM = codecs.BOM_UTF8
START = {"file": 0, "offset": 0, "number": 0}
csv.field_size_limit((1 << 31) - 1)


class InputFailure(Exception):
    """A file that cannot be read, in one line that begins with its name."""


@dataclass
class Batch:
    file: str
    rows: list  # (line or row number, bytes or object)
    size: int  # bytes, about
    end: dict  # the position behind it
    done: int  # bytes of all inputs read so far, for the progress bar


# ---- which files -----------------------------------------------------------------------------------------------------------------
def opened(path):
    """The file, and what is in it."""
    raw = open(path, "rb")
    return raw, gzip.GzipFile(fileobj=raw) if path.lower().endswith(".gz") else raw


def reader_of(path, name):
    """How a file is read, by its suffix; None: that is not known. With --format text, other suffixes are texts."""
    found = re.search(r"\.(\w+?)(\.gz)?$", os.path.basename(path).lower())
    reader = READERS.get(found and found[1])
    return None if reader in TABLES and found[2] else reader or ("text" if name == "text" and not NO_TEXT.search(path) else None)


def why_not(path, name, named=False):
    """What stands against reading a file; None: nothing. One that is named itself may be JSON without the suffix."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "is not a regular file, in which one can go back and go on; write it into one"
        raw, file = opened(path)
        with raw:
            head = file.read(HEAD)
    except (OSError, EOFError, zlib.error) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    reader = reader_of(path, name)
    if reader in TABLES:
        return None
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        plain = path.removesuffix(".gz")
        first, new = f"gunzip {shlex.quote(path)} && " * (plain != path), "-utf8".join(os.path.splitext(os.path.basename(plain)))
        return f"is UTF-16, not UTF-8; type: {first}iconv -f UTF-16 -t UTF-8 {shlex.quote(plain)} > {shlex.quote(new)}"
    if not reader and not (named and head.removeprefix(BOM).lstrip()[:1] in (b"{", b"[")):
        return f"is nothing that is read here ({', '.join(READERS)}, most also .gz); --format text reads any text"
    return "is binary, not text" if b"\0" in head else None


def saved_parts(folder, say):
    """The files of a folder of datasets' save_to_disk; None: it is none."""
    try:
        for about, key in (("dataset_dict.json", "splits"), ("state.json", "_data_files")):
            if os.path.exists(os.path.join(folder, about)):
                with open(os.path.join(folder, about), encoding="utf-8") as file:
                    parts = json.load(file)[key]
                if key == "_data_files":
                    return [os.path.join(folder, part["filename"]) for part in parts]
                chosen = os.path.join(folder, "train" if "train" in parts else parts[0])
                say(f"{folder}: of its splits ({', '.join(parts)}) {chosen} is taken")
                return saved_parts(chosen, say)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        raise InputFailure(f"{os.path.join(folder, about)}: is not as datasets' save_to_disk writes it") from None
    return None


def find(paths, name, say):
    """The files that are named, for folders those in them, in the order of their names. `name`: the format."""
    files, seen = [], set()

    def walk(folder, own, left):
        seen.add(os.path.realpath(folder))
        parts = saved_parts(folder, say)
        own += parts or ()
        for path in [os.path.join(folder, each) for each in sorted(os.listdir(folder))] if parts is None else ():
            base, known = os.path.basename(path), os.path.realpath(path) in seen
            if os.path.isdir(path) and not known and not base.startswith("."):
                walk(path, own, left)
            elif why := ("is hidden" if base.startswith(".") else "is about data" if base in ABOUT else "is there twice" if known else
                         why_not(path, name)):
                left[why.split(";")[0]].append(path)
            else:
                seen.add(os.path.realpath(path))
                own.append(path)

    for path in paths:
        own, left = [path], collections.defaultdict(list)
        if os.path.isdir(path):
            walk(path, own := [], left)
            texts = [each for each in own if reader_of(each, name) == "text"]
            if name != "text" and 0 < len(texts) < len(own):  # such as the README.md of a data set
                own, left["is text beside data"] = [each for each in own if each not in texts], texts
            say(f"{path}: takes {len(own):,} file{'s' * (len(own) != 1)}")
            for why, each in left.items():
                say(f"{path}: left out {len(each):,} file{'s' * (len(each) != 1)}: {os.path.relpath(each[0], path)} {why}")
            if not own:
                raise InputFailure(f"{path}: has no file that is read here; --format text reads those of any suffix as text")
        elif why := "is in a folder that is named, too" if os.path.realpath(path) in seen else why_not(path, name, True):
            raise InputFailure(f"{path}: {why}")
        files += own
    return files


def identity(path):
    """Size, time and first bytes of a file: they tell whether it is still the same."""
    try:
        status = os.stat(path)
        with open(path, "rb") as file:
            head = zlib.crc32(file.read(HEAD))
    except OSError as error:
        raise InputFailure(f"{path}: cannot be read: {error.strerror}") from None
    return {"path": path, "bytes": status.st_size, "modified": status.st_mtime_ns, "head": head}


# ---- rows ------------------------------------------------------------------------------------------------------------------------
def batches(paths, position, separator=None, name="auto", columns=None):
    """Every batch behind `position`, in order. `separator`: the line between documents of a text, b"" a blank one; None: there is
    none. `name`: the format; `columns`: those that are renamed."""
    sizes = [os.path.getsize(path) for path in paths]
    for i in range(position["file"], len(paths)):
        begin = position if i == position["file"] else START
        reader = reader_of(paths[i], name) or "json"
        found = (table_batches(paths[i], begin, TABLES[reader], name, columns or {}) if reader in TABLES
                 else line_batches(paths[i], begin, ROWS[reader], separator))
        for batch in found:
            batch.end["file"] = i
            batch.done = sum(sizes[:i]) + min(int(batch.done), sizes[i])
            yield batch


def lines(file, offset, number, _=None):
    """(its number, its bytes, how many, the bytes and lines of the file behind it) for every line behind a position"""
    file.seek(offset)
    for line in file:
        offset, number = offset + len(line), number + 1
        yield number, line.removeprefix(BOM) if number == 1 else line, len(line), offset, number


def json_rows(file, offset, number, _):
    """The same for every object: on a line of its own, or on any lines if the file begins with an array, or with a brace alone on its line."""
    head = file.read(HEAD).removeprefix(BOM).lstrip()
    return (json_values if head[:1] == b"[" or re.match(rb"\{[ \t\r]*\n", head) else lines)(file, offset, number)


def json_values(file, offset, _):
    """(its first line, a value, its size, values and lines up to its end) for every value of an array, or of those that follow each other"""
    file.seek(0)
    text, between, read = io.TextIOWrapper(file, "utf-8-sig"), re.compile(r"[\s,]*"), json.JSONDecoder().raw_decode
    buffer = text.read(HEAD)
    lead = re.match(r"\s*\[?", buffer)[0]
    at, line, count, array = len(lead), 1 + lead.count("\n"), 0, lead.endswith("[")
    while True:
        begin = between.match(buffer, at).end()
        try:
            value, end = read(buffer, begin)
        except json.JSONDecodeError as error:
            if more := text.read(max(HEAD, len(buffer) - at)):
                buffer, at = buffer[at:] + more, 0
                continue
            rest, line = buffer[begin:].strip(), line + buffer.count("\n", at, error.pos)
            text.detach()
            if rest == "]" * array:
                return
            raise InputFailure(f"{file.name}:{line}: not JSON: " + (
                "ends within its array or object; the file may be cut off" if records.is_cut(error) else
                "something stands behind its array; give one array, or an object on each line" if rest[0] == "]" else f"{error.msg} at column {error.colno}")) from None
        first, line, at, count = line + buffer.count("\n", at, begin), line + buffer.count("\n", at, end), end, count + 1
        if count > offset:
            yield first, value, end - begin, count, line


def text_rows(file, offset, number, separator):
    """The same for every document."""
    document, first = [], number + 1
    whole = lambda: (first, records.Text(b"".join(document).strip(b"\r\n")), sum(map(len, document)), offset, number)
    for _, line, _, offset, number in lines(file, offset, number):
        if line.strip() != separator:
            document.append(line)
            continue
        yield whole()
        document, first = [], number + 1
    yield whole()


def csv_rows(file, offset, number, _):
    """The same for every row below the line that names the columns. Cells that are empty are null."""
    place = [0, 0]  # the bytes and lines that are read

    def texts(*begin):
        for _, line, _, *place[:] in lines(file, *begin):
            yield line.decode("utf-8", "surrogateescape")
    comma = max(",;\t", key=next(texts(0, 0), "").count)
    names = next(csv.reader(texts(0, 0), delimiter=comma), [])
    if len({*names}) < len(names):
        raise InputFailure(f"{file.name}:1: names a column twice: {max(names, key=names.count)}")
    offset, number = (offset, number) if offset else place
    reader = csv.reader(texts(offset, number), delimiter=comma, strict=True)
    while True:
        try:
            cells = next(reader)
            row = records.Cells((name, cell or None) for name, cell in zip(names, cells) if name)
            if len(cells) != len(names):
                row = records.Bad(f"has {len(cells)} cells for {len(names)} columns; texts with {comma!r} or quotes stand in quotes") if cells else None
            elif any("\udc80" <= character <= "\udcff" for cell in cells if not cell.isascii() for character in cell):
                row = records.Bad("not UTF-8; convert the file, as with iconv -t UTF-8")
        except StopIteration:
            return
        except csv.Error as error:
            row = records.Bad(f"not CSV: {error}; quotes within quotes are doubled")
        if row:
            yield number + 1, row, place[0] - offset, *place
        offset, number = place


def line_batches(path, begin, found, separator):
    offset, number, rows, size = begin["offset"], begin["number"], [], 0
    try:
        raw, file = opened(path)
        with raw:
            batch = lambda: Batch(path, rows, size, {"offset": offset, "number": number}, raw.tell())
            for first, row, bytes_, offset, number in found(file, offset, number, separator):
                if not isinstance(row, bytes) or row.strip():
                    rows.append((first, row))
                    size += bytes_
                if size >= BATCH_BYTES or len(rows) >= BATCH_ROWS:
                    yield batch()
                    rows, size = [], 0
            if rows:
                yield batch()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputFailure(f"{path}:{number + 1}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


# ---- tables ----------------------------------------------------------------------------------------------------------------------
def parquet_pieces(path, wanted, row):
    """(number of the first, rows as Arrow has them, bytes of the file up to them), from about `row` on. `wanted` chooses columns."""
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        columns, begin, total = wanted(file.schema_arrow.names), 0, os.path.getsize(path)
        for group in range(file.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            if row < end:
                for rows in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                    yield begin, rows, total * begin / file.metadata.num_rows
                    begin += rows.num_rows
            begin = end


def arrow_pieces(path, wanted, row):
    """The same of Arrow's files and streams."""
    import pyarrow
    with pyarrow.memory_map(path) as source:
        whole = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if whole else pyarrow.ipc.open_stream(source)
        columns, begin = wanted(reader.schema.names), 0
        for rows in map(reader.get_batch, range(reader.num_record_batches)) if whole else reader:
            yield begin, rows.select(columns), source.tell()
            begin += rows.num_rows


def table_batches(path, begin, pieces, name, renamed):
    """Rows of Parquet or Arrow in the batches of `pieces`; `renamed`: columns of other names, {ours: their own}."""
    row, unread = begin["offset"], {}

    def wanted(names):
        lacking = [own for column, own in renamed.items() if not {column, own} & set(names)]
        if lacking:
            raise InputFailure(f"{path}: has no column {lacking[0]}, which --columns names; it has {', '.join(names)[:80]}")
        ours = {**dict(zip(names, names)), **{own: column for column, own in renamed.items()}}
        alone = name == "prompts" or name == "auto" and "prompt" in ours.values() and not set(ours.values()) & set(records.TALKS)
        columns = [column for column in names if alone or ours[column] in records.READ]
        if not columns:
            raise InputFailure(f"{path}: none of its columns ({', '.join(names[:4])}) is read; --columns text=COLUMN, prompt=COLUMN,... "
                               "says what they are (data/README.md)")
        unread.update(dict.fromkeys([column for column in names if column not in columns], records.Unread()))
        return columns

    try:
        import pyarrow
    except ImportError:
        raise InputFailure(f"{path}: Parquet and Arrow need pyarrow: pip install pyarrow") from None
    try:
        for first, rows, done in pieces(path, wanted, row):
            rows = rows.slice(max(row - first, 0))
            step = min(BATCH_ROWS, max(1, BATCH_BYTES * rows.num_rows // max(rows.nbytes, 1)))
            for at in range(0, rows.num_rows, step):
                piece = rows.slice(at, step)
                found = [(row + i + 1, {**without_nulls(record), **unread}) for i, record in enumerate(piece.to_pylist())]
                row += len(found)
                yield Batch(path, found, piece.nbytes, {"offset": row, "number": row}, done)
    except InputFailure:
        raise
    except Exception as error:  # such as a time that Python has no value for
        raise InputFailure(f"{path}: row {row + 1}: cannot be read: {' '.join(str(error).split())}") from None


def without_nulls(value, within=False):
    """Members that are null below tool_calls and tools are absent: a column gives each struct the members of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(item, within or key in ("tool_calls", "tools", "function_call"))
                for key, item in value.items() if not within or item is not None}
    return [without_nulls(item, within) for item in value] if isinstance(value, list) else value


ROWS = {"json": json_rows, "text": text_rows, "csv": csv_rows}
TABLES = {"parquet": parquet_pieces, "arrow": arrow_pieces}
