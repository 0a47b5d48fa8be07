"""Reads input files as batches of rows, with positions from which reading can continue.

JSON is read as lines of bytes, or as the objects of one array; a text as documents: the whole file, or the parts between separators. JSON
and texts may be compressed; the file's name tells. CSV, Parquet and Arrow are read as rows, only the known columns; for prompts
alone, all columns. A position
is {"file", "offset", "number"}: the file's index among the inputs, bytes (unpacked) or rows before it, and lines or rows, for messages.
"""

import codecs
import collections
import contextlib
import functools
import glob
import importlib.util
import io
import json
import os
import re
import shlex
import stat
import zlib
from dataclasses import dataclass

import records
import templates

BATCH_BYTES, BATCH_ROWS = 1 << 19, 512
HEAD = 1 << 16  # first bytes that identify a file
NO_TEXT = re.compile(r"\.(zip|7z|tar|tgz|pdf|docx|xlsx|bin|safetensors|gguf|npy|npz|pkl|pt)$", re.I)
PACKED = {"gz": ("gzip", "zcat"), "xz": ("lzma", "xzcat"), "bz2": ("bz2", "bzcat"), "zst": ("compression.zstd", "zstdcat")}
ABOUT = {"dataset_dict.json", "state.json", "dataset_info.json", "dataset_infos.json"}  # files without data; the first two belong to save_to_disk
SPLITS = {word: same.split()[0] for same in ("train training", "validation valid val dev", "test testing eval evaluation") for word in same.split()}
WORD = re.compile(rf"(?i)(?<![^-._ \d/])({'|'.join(SPLITS)})(?![^-._ \d/])")  # the words of splits in the name of a file or folder
SHARD = re.compile(r"(?:.*/)?data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")  # the hub's name for a file of a split
NO_NULLS = ("tool_calls", "tools", "functions", "function_call", "chat_template_kwargs")
START = {"file": 0, "offset": 0, "number": 0}


class InputFailure(Exception):
    """A file cannot be read: one line that begins with the file's name. batches() puts the name before a reader's message."""


@dataclass
class Batch:
    file: str
    rows: list  # (line or row number, bytes or object)
    size: int  # approximate bytes
    end: dict  # the position after this batch
    done: int  # bytes of all inputs read so far, for the progress bar


# ---- which files -----------------------------------------------------------------------------------------------------------------
def opened(path):
    """Opens a file, which may be compressed."""
    raw, suffix = open(path, "rb", HEAD), path.lower().rpartition(".")[2]
    if suffix == "zst" and not importlib.util.find_spec("compression"):  # before Python 3.14
        return raw, io.BufferedReader(importlib.import_module("pyarrow").input_stream(raw, compression="zstd"), HEAD)  # this file cannot seek
    return raw, io.BufferedReader(importlib.import_module(PACKED[suffix][0]).open(raw), HEAD) if suffix in PACKED else raw


def reader_of(path, name):
    """Returns how a file is read, by its suffix; None: unknown. With --format text, other suffixes are texts."""
    found = re.search(rf"\.(\w+?)(\.(?:{'|'.join(PACKED)}))?$", os.path.basename(path).lower())
    reader = READERS.get(found and found[1])
    return None if reader in BINARY and found[2] else reader or (text_rows if name == "text" and not NO_TEXT.search(path) else None)


def why_not(path, name, named=False):
    """Returns why a file cannot be read, or None. A file named directly may be JSON without the suffix."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "is not a regular file, which is needed to continue; write it into one"
        raw, file = opened(path)
        with raw:
            head = file.read(HEAD)
    except Exception as error:  # each kind of compression has its own error
        return f"cannot be read: {getattr(error, 'strerror', None) or error}{': pip install pyarrow' * (getattr(error, 'name', '') == 'pyarrow')}"
    reader = reader_of(path, name)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and reader not in BINARY:
        cat = PACKED[path.lower().rpartition(".")[2]][1] if file is not raw else "cat"
        return f"is UTF-16, not UTF-8; type: {cat} {shlex.quote(path)} | iconv -f UTF-16 -t UTF-8 > NEW"
    if not reader and not (named and head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")):
        return f"is of an unknown kind ({', '.join(READERS)}, most also .gz, .xz, .bz2, .zst, are read); --format text reads any text"
    return "is binary, not text" if b"\0" in head and reader not in BINARY else None


def configurations(folder, files):
    """Returns {name: (whether it is the default, {path: split})} of `configs` in the YAML header of a hub folder's README.md."""
    made, header = {}, None
    with contextlib.suppress(OSError), open(os.path.join(folder, "README.md"), encoding="utf-8", errors="replace") as file:
        text = file.read()
        header = re.match(r"---\s*\n(?:(?!---).*\n)*?configs:[ \t]*\n(( *)- .*\n(?:(?:[ #]|- ).*\n|\n)*)", text)
        whole = (re.match(r"---\s*\n(.*?)\n---", text, re.S) or ["", ""])[1]
        if len({*re.findall(r"config_name: *([^\s,}]+)", whole)}) > 1 and re.search(r"data_dir:|configs: *\[|- *\{", whole):
            raise InputFailure(f"{folder}: its README.md has configurations by data_dir, or on one line, which are not read; name files of one as "
                               "FILE; --splits all takes every file")
    for config in re.split(rf"(?m)^{header[2]}- ", header[1])[1:] if header else ():
        value = lambda key, text: (re.findall(rf"(?m)^\W*{key}: *['\"]?([^'\"\n#]*[^'\"\n# ])", text) or [None])[0]
        found = [(value("split", part) or "train", name.strip(" '\"")) for part in re.split(r"(?m)^ *- (?=\w+:)", config)
                 for names in re.findall(r"(?m)^\s*(?:path:|data_files:|-) *(\S.*?) *(?: #.*)?$", part)
                 for name in (names[1:-1] if names[0] == "[" else names).split(",")]
        paths = {path: split for split, name in found for path in glob.glob(os.path.join(glob.escape(folder), os.path.normpath(name)), recursive=True)
                 if path in files}
        made |= {value("config_name", config) or "default": (value("default", config) == "true", paths)} if paths else {}
    return made


def chosen(folder, files, texts, asked, saved, left, say):
    """Returns the files of the requested splits, else of train, found as datasets' load_dataset finds them; puts other files into `left`.
    saved: {folder of save_to_disk: its split}. texts: text files have splits only if all of them name one, and one is train."""
    inner = {path: os.path.relpath(path, folder) for path in files if reader_of(path, "") not in (None, text_rows) or ".txt" in path.lower()}
    if asked == ["all"] or not inner:
        return files
    configs, shown = configurations(folder, inner), lambda names: ", ".join([*names[:8], *["..."] * (len(names) > 8)])
    config = [each for each in configs if configs[each][0]] or ["default"] * ("default" in configs) or [*configs] or [""]
    if len(config) > 1:
        raise InputFailure(f"{folder}: its README.md has configurations {shown(config)}; name files of one as FILE; --splits all takes every file")
    own = configs[config[0]][1] if configs else dict.fromkeys(inner)
    word = lambda text: SPLITS[found[-1].lower()] if (found := WORD.findall(text)) else None
    for split_of in (lambda path: next((split for begin, split in saved.items() if path.startswith(begin)), None), own.get,
                     lambda path: (found := SHARD.fullmatch(os.path.join(os.path.basename(os.path.abspath(folder)), inner[path]))) and found[1],
                     lambda path: word(os.path.dirname(inner[path])) or word(os.path.basename(inner[path])), lambda path: "train"):
        found = {path: split for path in own if (split := split_of(path))}
        if found and (asked or not texts or "train" in found.values() and len(found) == len(inner)):
            break
    names, part, more = sorted({*found.values()}), len(found) < len(own), len(configs) > 1
    trains = ["train"] if "train" in names else [split for split in names if word(split) == "train"] or names
    takes = [split if split in names else SPLITS.get(split, split) for split in asked] or trains
    if not {*takes} <= {*names} or not asked and (len(takes) > 1 or part and word(takes[0]) != "train"):
        unknown = f"has no split {shown(sorted({*takes} - {*names}))}; it " * (not {*takes} <= {*names})
        raise InputFailure(f"{folder}: {unknown}has splits {shown(names)}{' and other files' * part}; --splits NAME,... chooses, --splits all takes all")
    if names != ["train"] or more:
        say(f"{folder}: takes {shown(takes)} of its splits ({shown(names)})" + f", configuration {config[0]} of {shown([*configs])}" * more)
    for path in [path for path in inner if found.get(path) not in takes]:
        left["is not of that split"].append(path)
    return [path for path in files if path not in inner or found.get(path) in takes]


def find(paths, name, say, splits=(), own_splits=None):
    """Returns the named files, and the files in named folders, sorted by name. name: the format; splits: from --splits; own_splits: {folder: its
    splits} of folders that have others"""
    files, seen, saved = [], set(), {}

    def walk(folder, own, left):
        seen.add(os.path.realpath(folder))
        divided, parts = (templates.read_json(os.path.join(folder, about)).get(key)
                          for about, key in (("dataset_dict.json", "splits"), ("state.json", "_data_files")))
        saved.update({os.path.join(folder, split, ""): split for split in divided or ()})
        own += [os.path.join(folder, part["filename"]) for part in parts or ()]
        for path in [] if parts else [os.path.join(folder, each) for each in sorted(os.listdir(folder))]:
            base, known = os.path.basename(path), os.path.realpath(path) in seen
            why = ("is hidden" if base.startswith(".") else "is about data" if base in ABOUT else "is listed twice" if known else
                   "cannot be read" if not os.access(path, os.R_OK) else None if os.path.isdir(path) else why_not(path, name))
            if why:
                left[why.split(";")[0]].append(path)
            elif os.path.isdir(path):
                walk(path, own, left)
            else:
                seen.add(os.path.realpath(path))
                own.append(path)

    for path in paths:
        own, left, why = [], collections.defaultdict(list), "has no file of a known kind; --format text reads files of any suffix as text"
        if os.path.isdir(path):
            walk(path, own, left)
            data, texts = ([each for each in own if (reader_of(each, name) is text_rows) == text] for text in (False, True))
            if name != "text" and data and texts:  # texts next to data, such as the README.md of a data set
                own, left["is text next to data"] = data, texts
            own = chosen(path, own, name == "text" or not data, (own_splits or {}).get(path) or splits, saved, left, say)
            for reason, each in left.items():
                say(f"{path}: left out {len(each):,} file{'s' * (len(each) != 1)}: {os.path.relpath(each[0], path)} {reason}")
            names = ", ".join([os.path.relpath(each, path) for each in own[:4]] + ["..."] * (len(own) > 4))
            say(f"{path}: takes {len(own):,} file{'s' * (len(own) != 1)}: {names}")
        else:
            why = "is also in a named folder" if os.path.realpath(path) in seen else why_not(path, name, True)
            own = [] if why else [path]
        if not own:
            raise InputFailure(f"{path}: {why}")
        files += own
    return files


def identity(path):
    """Returns size, time and first bytes of a file, to detect a change."""
    status = os.stat(path)
    with open(path, "rb") as file:
        return {"path": path, "bytes": status.st_size, "modified": status.st_mtime_ns, "head": zlib.crc32(file.read(HEAD))}


# ---- rows ------------------------------------------------------------------------------------------------------------------------
def batches(paths, position, separator=None, name="auto", columns=None):
    """Yields every batch after `position`, in order. `separator`: the line between documents of a text, b"" a blank line; None: no separator.
    `name`: the format; `columns`: renamed columns, {our name: the row's name}."""
    before = 0  # bytes of the files before this one
    for i, path in enumerate(paths):
        begin = position if i == position["file"] else START
        offset, number, rows, size = begin["offset"], begin["number"], [], 0
        try:
            raw, file = opened(path)
            with raw:
                batch = lambda: Batch(path, rows, size, {"file": i, "offset": offset, "number": number}, before + raw.tell())
                read = (reader_of(path, name) or json_rows)(file, offset, number, separator, name, columns or {}) if i >= position["file"] else ()
                for first, row, bytes_, offset, number in read:
                    if not isinstance(row, bytes) or row.strip():
                        rows.append((first, row))
                        size += bytes_
                    if size >= BATCH_BYTES or len(rows) >= BATCH_ROWS:
                        yield batch()
                        rows, size = [], 0
                if rows:
                    yield batch()
                before += os.fstat(raw.fileno()).st_size
        except InputFailure as failure:
            raise InputFailure(f"{path}{failure}") from None
        except ImportError:
            raise InputFailure(f"{path}: CSV, Parquet and Arrow need pyarrow: pip install pyarrow") from None
        except Exception as error:  # for example a time that Python cannot represent
            why = " ".join(str(getattr(error, "strerror", None) or error).split())
            why = "a row has more than 16 MB; convert it to JSON, which has no limit" if why.startswith("straddling object") else why
            raise InputFailure(f"{path}:{number + 1}: cannot be read: {why}") from None


def lines(file, offset, number, *_):
    """Yields (number, bytes, size, the file's bytes and lines up to the line's end) for every line after a position."""
    at = file.seek(offset) if file.seekable() else 0
    for line in file:
        at += len(line)
        if at > offset:
            offset, number = at, number + 1
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, len(line), offset, number


def json_rows(file, offset, number, *_):
    """Yields as lines() for every object: one a line, or over several lines if the file begins with an array or a line "{"."""
    head = file.peek(HEAD).removeprefix(codecs.BOM_UTF8).lstrip()
    return (json_values if head[:1] == b"[" or re.match(rb"\{[ \t\r]*\n", head) else lines)(file, offset, number)


def json_values(file, offset, _):
    """Yields (its first line, a value, its size, values and lines up to its end) for every value of an array or of a sequence."""
    text, between, read = io.TextIOWrapper(file, "utf-8-sig"), re.compile(r"[\s,]*"), json.JSONDecoder().raw_decode
    buffer = text.read(HEAD)
    lead = re.match(r"\s*\[?", buffer)[0]
    at, line, count = len(lead), 1 + lead.count("\n"), 0
    while True:
        begin = between.match(buffer, at).end()
        try:
            value, end = read(buffer, begin)
        except json.JSONDecodeError as error:
            near = records.is_cut(error) or error.pos + 10 > len(buffer)  # a word or number may be cut at the buffer's end
            if near and (more := text.read(max(HEAD, len(buffer) - at))):
                buffer, at = buffer[at:] + more, 0
                continue
            rest, line = buffer[begin:].strip(), line + buffer.count("\n", at, error.pos)
            text.detach()
            if rest == "]" * lead.endswith("["):
                return
            why = ("ends within its array or object; the file may be cut off" if records.is_cut(error) else "something follows its array; "
                   "give one array, or an object on each line" if rest[0] == "]" else f"{error.msg} at column {error.colno}")
            raise InputFailure(f":{line}: not JSON: {why}") from None
        first, line, at, count = line + buffer.count("\n", at, begin), line + buffer.count("\n", at, end), end, count + 1
        if count > offset:
            yield first, value, end - begin, count, line


def text_rows(file, offset, number, separator, *_):
    """Yields as lines() for every document."""
    document, first = [], number + 1
    whole = lambda: (first, records.Text(b"".join(document).strip(b"\r\n")), sum(map(len, document)), offset, number)
    for _, line, _, offset, number in lines(file, offset, number):
        if line.strip() != separator:
            document.append(line)
            continue
        yield whole()
        document, first = [], number + 1
    yield whole()


# ---- tables ----------------------------------------------------------------------------------------------------------------------
def table_rows(pieces, file, row, _number, _separator, name, renamed):
    """Yields as lines() for a table's rows after the first `row`. pieces(file, wanted) yields Arrow batches, wanted(names) chooses columns."""
    unread = {}

    def wanted(names):
        if len(set(names)) < len(names):
            raise InputFailure(f": has two columns {max(names, key=names.count)}")
        ours = {**dict(zip(names, names)), **{own: column for column, own in renamed.items()}}
        alone = name == "prompts" or name == "auto" and "prompt" in ours.values() and not set(ours.values()) & set(records.TALKS)
        columns = [column for column in names if alone or column in renamed.values() or ours[column] in records.READ or
                   records.meaning(ours[column]) not in (None, *["images"] * (name != "auto"))]  # pictures are refused
        if not columns:
            raise InputFailure(f": none of its columns ({', '.join(names[:4])}) is known; map them with --columns text=COLUMN, "
                               "prompt=COLUMN,... (data/README.md)")
        unread.update(dict.fromkeys([column for column in names if column not in columns], records.Unread("unread")))
        return columns

    begin = 0  # number of the first row in `rows`
    for rows in pieces(file, wanted):
        clean = without_nulls if any(name in str(rows.schema) for name in NO_NULLS) else dict
        for at in range(max(row - begin, 0), rows.num_rows, 64):
            piece = rows.slice(at, 64)
            size = piece.nbytes // piece.num_rows
            for record in piece.to_pylist():
                row, record = row + 1, clean(record) | unread
                yield row, record, size, row, row
        begin += rows.num_rows


def parquet_pieces(file, wanted):
    import pyarrow.parquet
    table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    return table.iter_batches(BATCH_ROWS, columns=wanted(table.schema_arrow.names), use_threads=False)


def arrow_pieces(file, wanted):
    import pyarrow.ipc
    whole = file.read(6) == b"ARROW1"
    file.seek(0)
    table = pyarrow.ipc.open_file(file) if whole else pyarrow.ipc.open_stream(file)
    columns = wanted(table.schema.names)
    return (rows.select(columns) for rows in (map(table.get_batch, range(table.num_record_batches)) if whole else table))


def csv_pieces(file, wanted):
    """Reads CSV: its first line names the columns; values are texts."""
    import pyarrow.csv
    head = b"".join(file.peek(HEAD).partition(b"\n")[:2])
    options = {"read_options": pyarrow.csv.ReadOptions(use_threads=False, block_size=1 << 24),  # limits a row's size
               "parse_options": pyarrow.csv.ParseOptions(delimiter=max(",;\t", key=head.decode("utf-8", "replace").count), newlines_in_values=True)}
    names = pyarrow.csv.open_csv(io.BytesIO(head), **options).schema.names
    texts = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()), null_values=[""], strings_can_be_null=True,
                                       quoted_strings_can_be_null=False, include_columns=wanted(names))
    return pyarrow.csv.open_csv(file, convert_options=texts, **options)


def without_nulls(value, within=False):
    """Drops null members below NO_NULLS: a column gives each struct the members of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(item, within or key in NO_NULLS)
                for key, item in value.items() if not within or item is not None}
    return [without_nulls(item, within) for item in value] if isinstance(value, list) else value


csv_rows, parquet_rows, arrow_rows = (functools.partial(table_rows, pieces) for pieces in (csv_pieces, parquet_pieces, arrow_pieces))
BINARY = (parquet_rows, arrow_rows)
READERS = {suffix: reader for suffixes, reader in (("jsonl json ndjson", json_rows), ("txt md markdown", text_rows), ("csv tsv", csv_rows), (
    "parquet pq", parquet_rows), ("arrow feather", arrow_rows)) for suffix in suffixes.split()}
