"""Writes and verifies token shards of streambp.c, version 1. data/README.md describes the format byte by byte.

A shard is written in sections next to its final name (.table.tmp, .ids.tmp, .counts.tmp, maybe .values.tmp, or .index.tmp and
.columns.tmp), because the document table is first and its size is unknown until the end. They are joined to NAME.tmp, which the caller
renames. ShardWriter.state() is all that a restart needs: sections are truncated to the lengths that it implies. Needs numpy.
"""

import json
import os
import shutil
import struct
import zlib

import numpy as np

MAGIC, VERSION, BYTE_ORDER = b"SBPSHARD", 1, 0x01020304
HEADER_BYTES, ALIGNMENT, NAME_BYTES = 256, 64, 64
HEADER = struct.Struct("<8sIIQQQQQQIIQQQQQQII64sQQI4xQ32x")
FIELDS = ("magic", "version", "byte_order", "header_bytes", "file_bytes", "documents", "tokens", "counted", "longest", "id_bytes",
          "kind", "vocabulary", "tokenizer", "table_at", "ids_at", "counts_at", "values_at", "table_crc", "header_crc", "name",
          "columns_at", "longest_columns", "columns_crc", "chat_template")
HEADER_CRC_AT = 124
DOCUMENTS, PAIRS, GROUPS, PROMPTS, ADVANTAGES, LABELS = range(6)  # ADVANTAGES: documents with values; kind 0 in files
KINDS = ("documents", "preference pairs", "groups", "prompts", "documents with advantages", "labelled answers")
VALUES = np.dtype("<f4")
LLM_C = {20240520: "uint16", 20240801: "uint32"}
TABLE = np.dtype([("begin", "<u8"), ("tokens", "<u8"), ("counted", "<u8"), ("group", "<u8"), ("prompt", "<u8"), ("reward", "<f4"),
                  ("crc", "<u4")])
COLUMNS = np.dtype([("begin", "<u8"), ("bytes", "<u4"), ("crc", "<u4")])  # an entry in the index of prompts' columns; the columns' text follows the index
EMPTY_COLUMNS = b"{}"
STRETCH = 1 << 22  # tokens verified at a time
assert HEADER.size == HEADER_BYTES and TABLE.itemsize == 48 and COLUMNS.itemsize == 16


class ShardError(Exception):
    """A faulty file: one line that begins with its name."""


def aligned(offset):
    return -(-offset // ALIGNMENT) * ALIGNMENT


def id_bytes_of(vocabulary):
    return 2 if vocabulary <= 1 << 16 else 4


def short_name(name):
    """Returns UTF-8 that fits the header's field with its zero, cut between characters."""
    return name.encode("utf-8", "replace")[:NAME_BYTES - 1].decode("utf-8", "ignore").encode("utf-8")


def fingerprint(content):
    """Returns the identity of a tokenizer.json's bytes or a template's: (bytes << 32) | crc32."""
    return len(content) << 32 | zlib.crc32(content)


def document_crc(ids, counts, values=b""):
    """Returns the crc32 of a document's bytes in the file: ids, counts, then values if any."""
    return zlib.crc32(values, zlib.crc32(counts, zlib.crc32(ids)))


# ---- writing -----------------------------------------------------------------------------------------------------------------
class ShardWriter:
    """Writes STEM-00000.bin.tmp, STEM-00001.bin.tmp, ... into a folder. A shard ends before the sample that would exceed
    `shard_tokens`, so no sample is split; only a single larger sample makes a larger shard."""

    def __init__(self, folder, stem, kind, vocabulary, tokenizer, name, shard_tokens, state=None, chat_template=lambda: 0, widest=0):
        self.folder, self.stem, self.kind = folder, stem, kind
        self.vocabulary, self.tokenizer, self.name = vocabulary, tokenizer, name
        self.id_bytes, self.shard_tokens = id_bytes_of(max(vocabulary, widest)), shard_tokens  # widest: the ids may be as large as the vocabulary
        self.shard, self.files = 0, None
        self.chat_template = chat_template  # returns the fingerprint of the template that rendered samples so far, or 0
        self.old = []  # sections of closed shards, which are kept until the caller has saved a state without them
        self._begin()
        if state:
            self.shard = state["shard"]
            for key in self.COUNTS:
                if "column_bytes" not in state and self.kind == PROMPTS and state["documents"]:
                    raise ShardError(f"{self.path()}.tmp: was begun by an older prepare.py, without columns; --force begins anew")
                setattr(self, key, state.get(key, 0))
            if self.documents:
                self._open("r+b")

    COUNTS = ("documents", "samples", "tokens", "counted", "longest", "largest", "table_crc", "column_bytes", "longest_columns", "columns_crc")

    def _begin(self):
        for key in self.COUNTS:
            setattr(self, key, 0)

    def path(self, shard=None):
        return os.path.join(self.folder, f"{self.stem}-{self.shard if shard is None else shard:05d}.bin")

    def _sizes(self):
        more = {ADVANTAGES: {"values": self.tokens * VALUES.itemsize},
                PROMPTS: {"index": self.documents * COLUMNS.itemsize, "columns": self.column_bytes}}.get(self.kind, {})
        return {"table": self.documents * TABLE.itemsize, "ids": self.tokens * self.id_bytes, "counts": self.tokens, **more}

    def _open(self, mode):
        self.files = {}
        for section, size in self._sizes().items():
            path = f"{self.path()}.{section}.tmp"
            file = self.files[section] = open(path, mode, buffering=1 << 20)
            if os.fstat(file.fileno()).st_size < size:
                raise ShardError(f"{path}: is shorter than the {size} bytes that were recorded; --force begins anew")
            file.truncate(size)
            file.seek(size)

    def add(self, ids, counts, table, documents_of_sample, values=None, columns=None):
        """Adds whole samples: `ids` [tokens] in the file's type, `counts` [tokens] uint8, `table` [documents] with begin counted from
        ids[0], and each sample's number of documents; for ADVANTAGES `values` [tokens] float32; for PROMPTS `columns`, the bytes of a
        JSON object for every document, or None."""
        ends = np.cumsum(documents_of_sample)  # the index after each sample's last document
        token_ends = (table["begin"] + table["tokens"])[ends - 1].astype(np.int64)
        first = token = document = 0
        while first < len(ends):
            fitting = int(np.searchsorted(token_ends, token + self.shard_tokens - self.tokens, "right"))
            if fitting <= first:
                if self.tokens:
                    self.close()
                    continue
                fitting = first + 1
            last, until = int(ends[fitting - 1]), int(token_ends[fitting - 1])
            if self.files is None:
                self._open("w+b")
            sections = {"ids": ids[token:until], "counts": counts[token:until]}
            if values is not None:
                sections["values"] = values[token:until].astype(VALUES)
            if self.kind == PROMPTS:
                sections |= self._columns((columns or [b""] * len(table))[document:last])
            self._append(sections, table[document:last], token, documents_of_sample[first:fitting])
            first, token, document = fitting, until, last

    def _columns(self, columns):
        """Appends to the two sections of columns."""
        index = np.zeros(len(columns), COLUMNS)
        index["bytes"], index["crc"] = [len(text) for text in columns], [zlib.crc32(text) for text in columns]
        index["begin"] = self.column_bytes + np.cumsum(index["bytes"], dtype=np.uint64) - index["bytes"]
        self.column_bytes += int(index["bytes"].sum(dtype=np.uint64))
        self.longest_columns = max(self.longest_columns, int(index["bytes"].max()))
        self.columns_crc = zlib.crc32(index.tobytes(), self.columns_crc)
        return {"index": index.view(np.uint8), "columns": np.frombuffer(b"".join(columns), np.uint8)}

    def _append(self, sections, table, begin, documents_of_sample):
        table = table.copy()
        table["begin"] = table["begin"].astype(np.int64) + (self.tokens - begin)
        table["group"] = self.samples + np.repeat(np.arange(len(documents_of_sample), dtype=np.uint64), documents_of_sample)
        raw = table.tobytes()
        self.files["table"].write(raw)
        for name, section in sections.items():
            self.files[name].write(np.ascontiguousarray(section).data)
        self.table_crc = zlib.crc32(raw, self.table_crc)
        self.documents += len(table)
        self.samples += len(documents_of_sample)
        self.tokens += len(sections["ids"])
        self.counted += int(table["counted"].sum())
        self.longest, self.largest = max(self.longest, int(table["tokens"].max())), max(self.largest, int(sections["ids"].max()) + 1)

    def header(self):
        table_at = HEADER_BYTES
        ids_at = aligned(table_at + self.documents * TABLE.itemsize)
        counts_at = aligned(ids_at + self.tokens * self.id_bytes)
        end, values_at, kind = counts_at + self.tokens, 0, self.kind
        if kind == ADVANTAGES:
            values_at, kind = aligned(end), DOCUMENTS
            end = values_at + self.tokens * VALUES.itemsize
        columns_at = 0
        if self.longest_columns > len(EMPTY_COLUMNS):  # a prompt has columns
            columns_at = aligned(end)
            end = columns_at + self.documents * COLUMNS.itemsize + self.column_bytes
        fields = [MAGIC, VERSION, BYTE_ORDER, HEADER_BYTES, end, self.documents, self.tokens, self.counted,
                  self.longest, self.id_bytes, kind, max(self.vocabulary, self.largest), self.tokenizer, table_at, ids_at, counts_at, values_at,
                  self.table_crc, 0, short_name(self.name), columns_at, *(columns_at and (self.longest_columns, self.columns_crc) or (0, 0)),
                  self.chat_template()]
        fields[FIELDS.index("header_crc")] = zlib.crc32(HEADER.pack(*fields))
        at = {"table": table_at, "ids": ids_at, "counts": counts_at, "values": values_at}
        return HEADER.pack(*fields), {**at, "index": columns_at, "columns": columns_at and columns_at + self.documents * COLUMNS.itemsize}

    def close(self):
        """Joins the sections to NAME.tmp and syncs it. Does nothing for a shard without documents."""
        if not self.documents:
            return
        header, at = self.header()
        with open(self.path() + ".tmp", "wb") as whole:
            whole.write(header)
            for section, file in self.files.items():
                file.flush()
                if at[section]:
                    whole.write(b"\0" * (at[section] - whole.tell()))
                    file.seek(0)
                    shutil.copyfileobj(file, whole, 1 << 20)
                file.close()
                self.old.append(file.name)
            whole.flush()
            os.fsync(whole.fileno())
        self.files = None
        self.shard += 1
        self._begin()

    def state(self):
        """Syncs the sections and returns a state from which a new writer can continue."""
        for file in (self.files or {}).values():
            file.flush()
            os.fsync(file.fileno())
        return {"shard": self.shard, **{key: getattr(self, key) for key in self.COUNTS}}

    def forget_old(self):
        """Removes the sections of shards that were closed before the last state(). Call it after that state was saved."""
        for path in self.old:
            os.remove(path)
        self.old = []


# ---- reading -----------------------------------------------------------------------------------------------------------------
class Shard:
    """A shard's header, and its table, ids, counts, values and columns_index (None: absent) as maps of the file. Raises ShardError at a
    fault."""

    def __init__(self, path):
        self.path = path
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            raw = file.read(HEADER_BYTES)
        if len(raw) >= 8 and struct.unpack("<i", raw[:4])[0] in LLM_C:
            raise ShardError(f"{path}: is one of llm.c's shards, which have no checksums; train reads it without conversion")
        if raw[:8] != MAGIC:
            raise ShardError(f"{path}: is not a token shard: it does not begin with {MAGIC.decode()}")
        self._want(len(raw) >= HEADER_BYTES, f"ends after {size} bytes, within its header")
        values = dict(zip(FIELDS, HEADER.unpack(raw)))
        self.__dict__.update(values)
        self.name = values["name"].split(b"\0")[0].decode("utf-8", "replace")
        if self.version != VERSION:
            raise ShardError(f"{path}: has version {self.version}; this program knows version {VERSION}")
        blank = raw[:HEADER_CRC_AT] + b"\0" * 4 + raw[HEADER_CRC_AT + 4:]
        self._want(zlib.crc32(blank) == self.header_crc, "its header is damaged (checksum)")
        self._want(self.file_bytes == size, f"has {size} bytes, its header says {self.file_bytes}")
        self._check_layout()
        self.table = self._map(TABLE, self.table_at, self.documents)
        self.ids = self._map(np.dtype("<u2" if self.id_bytes == 2 else "<u4"), self.ids_at, self.tokens)
        self.counts = self._map(np.dtype("u1"), self.counts_at, self.tokens)
        self.values = self._map(VALUES, self.values_at, self.tokens) if self.values_at else None
        self.columns_index = self._map(COLUMNS, self.columns_at, self.documents) if self.columns_at else None
        self.holds = KINDS[ADVANTAGES if self.values_at else self.kind]

    def _want(self, right, what):
        if not right:
            raise ShardError(f"{self.path}: {what}; make it again")

    def _map(self, dtype, at, length):
        return np.memmap(self.path, dtype, "r", at, (length,))

    def _check_layout(self):
        table_end = HEADER_BYTES + self.documents * TABLE.itemsize
        ids_end = self.ids_at + self.tokens * self.id_bytes
        counts_end = self.counts_at + self.tokens
        end = self.values_at + self.tokens * VALUES.itemsize if self.values_at else counts_end
        if self.columns_at:  # the length of this section is in the index
            end = max(self.file_bytes, self.columns_text())
        wrong = ("bytes of an id" if self.id_bytes not in (2, 4) else "kind" if self.kind not in (DOCUMENTS, PAIRS, GROUPS, PROMPTS, LABELS)
                 else "byte order" if self.byte_order != BYTE_ORDER
                 else "kind, with values," if self.values_at and self.kind != DOCUMENTS
                 else "kind, with columns," if self.columns_at and self.kind != PROMPTS
                 else "number of documents" if not self.documents
                 else "vocabulary" if self.id_bytes == 2 and self.vocabulary > 1 << 16
                 else "layout" if (self.header_bytes, self.table_at, self.ids_at, self.counts_at, self.values_at, self.columns_at,
                              self.file_bytes) != (HEADER_BYTES, HEADER_BYTES, aligned(table_end), aligned(ids_end),
                                                   self.values_at and aligned(counts_end), self.columns_at and aligned(counts_end), end)
                 else None)
        self._want(not wrong, f"its header's {wrong} is invalid")

    def columns_text(self):
        """Returns the offset of the columns' text."""
        return self.columns_at + self.documents * COLUMNS.itemsize

    def columns(self):
        """Yields the object of each prompt's other columns."""
        if not self.columns_at:
            yield from ({} for _ in range(self.documents))
            return
        with open(self.path, "rb") as file:
            for number, (begin, size, crc) in enumerate(self.columns_index.tolist()):
                file.seek(self.columns_text() + begin)
                text = file.read(size)
                self._want(zlib.crc32(text) == crc, f"the columns of document {number} are damaged (checksum)")
                try:
                    value = json.loads(text.decode("utf-8"))
                except (ValueError, RecursionError):
                    value = None
                right = isinstance(value, dict) and min(text) >= 0x20
                self._want(right, f"the columns of document {number} are not a JSON object on one line")
                yield value

    def _verify_columns(self):
        index = self.columns_index
        begins = np.concatenate([[0], np.cumsum(index["bytes"], dtype=np.uint64)])
        self._want(zlib.crc32(index.data) == self.columns_crc, "its index of columns is damaged (checksum)")
        right = np.array_equal(begins[:-1], index["begin"]) and int(index["bytes"].max()) == self.longest_columns
        self._want(right and self.columns_text() + int(begins[-1]) == self.file_bytes,
                   "its columns are not contiguous up to its end")
        for _ in self.columns():
            pass

    def verify(self):
        """Verifies every checksum and every rule of the format."""
        table = self.table
        self._want(zlib.crc32(table.data) == self.table_crc, "its document table is damaged (checksum)")
        begins = np.concatenate([[0], np.cumsum(table["tokens"].astype(np.int64))])
        right = np.array_equal(begins[:-1], table["begin"]) and begins[-1] == self.tokens
        self._want(right, "its documents are not contiguous")
        self._want(table["counted"].sum() == self.counted and table["tokens"].max() == self.longest,
                   "the sums in its header differ from the sums of its documents")
        group = table["group"].astype(np.int64)
        steps = np.diff(group)
        if self.kind in (DOCUMENTS, PROMPTS, LABELS):
            grouped = np.array_equal(group, np.arange(self.documents))
        elif self.kind == PAIRS:
            grouped = self.documents % 2 == 0 and np.array_equal(group, np.arange(self.documents) // 2)
        else:
            grouped = group[0] == 0 and bool(((steps == 0) | (steps == 1)).all())
        self._want(grouped, "its groups are not numbered in order")
        sizes = np.bincount(group)
        self._want(self.kind != GROUPS or sizes.min() >= 2, f"group {int(np.argmin(sizes))} has only one completion")
        self._want(np.isfinite(table["reward"]).all(), "has rewards that are not finite numbers")
        self._want(self.kind != LABELS or np.isin(table["reward"], (0, 1)).all(), "has labels that are neither 0 nor 1")
        for number, entry in enumerate(table):
            self._verify_document(number, entry, int(begins[number]))
        if self.columns_at:
            self._verify_columns()
        self._verify_padding()

    def _verify_document(self, number, entry, begin):
        tokens, said, prompt = (int(entry[name]) for name in ("tokens", "counted", "prompt"))
        name, counted, crc, largest, alone = f"document {number}", 0, 0, 0, self.kind == PROMPTS
        self._want(tokens >= 2 - alone and (said < 1) == alone and alone <= prompt <= tokens,
                   f"{name} has {tokens} tokens, {said} that count, a prompt of {prompt}, which is impossible")
        for at in range(begin, begin + tokens, STRETCH):
            ids = self.ids[at:min(at + STRETCH, begin + tokens)]
            largest, crc = max(largest, int(ids.max())), zlib.crc32(ids.data, crc)
        for at in range(begin, begin + tokens, STRETCH):
            counts = self.counts[at:min(at + STRETCH, begin + tokens)]
            counted, crc = counted + int(counts.sum()), zlib.crc32(counts.data, crc)
            self._want(counts.max() <= 1 and not (at == begin and counts[0]), f"{name} has invalid counts")
        for at in range(begin, begin + tokens if self.values_at else begin, STRETCH):
            values = self.values[at:min(at + STRETCH, begin + tokens)]
            crc = zlib.crc32(values.data, crc)
            self._want(np.isfinite(values).all(), f"{name} has advantages that are not finite numbers")
        self._want(crc == entry["crc"], f"{name} (tokens {begin} to {begin + tokens - 1}) is damaged (checksum)")
        self._want(largest < self.vocabulary, f"{name} has id {largest}, the vocabulary is {self.vocabulary}")
        self._want(counted == said, f"{name} says {said} targets that count, and marks {counted}")

    def _verify_padding(self):
        gaps = ((HEADER_BYTES + self.documents * TABLE.itemsize, self.ids_at),
                (self.ids_at + self.tokens * self.id_bytes, self.counts_at),
                (self.counts_at + self.tokens, self.values_at or self.columns_at or self.counts_at + self.tokens))
        with open(self.path, "rb") as file:
            for begin, end in gaps:
                file.seek(begin)
                self._want(not any(file.read(end - begin)), f"bytes {begin} to {end} are not zero")
