"""Encodes batches of input in several processes and returns them in order. Batches in flight are bounded in number and bytes. The death
of a worker or of the parent ends all processes.
"""

import collections
import multiprocessing
import multiprocessing.connection
import os
import signal
from dataclasses import dataclass, field

import numpy as np

import encode
import records
import shards

MOST_BYTES = 16 << 20  # bytes of input in flight in addition to the batch that is awaited
MOST_CHECKED = 1 << 20  # tokens: checking longer documents takes as long as encoding them
encoder = None  # the encoder, made before the workers are forked so that they share its memory


class WorkerFailure(Exception):
    """A worker died, or failed for a reason other than a bad sample: one line."""


@dataclass
class Result:
    """Samples of a batch in order: the accepted ones in the shard's form, and the rejected ones."""

    ids: np.ndarray
    counts: np.ndarray
    values: np.ndarray  # [tokens] advantages, 0 for samples without advantages; None: no sample has any
    table: np.ndarray  # begin counted from ids[0]
    rows: list  # for accepted samples their row in the batch,
    kinds: list  # their kind,
    documents: list  # and their number of documents
    columns: list  # for each document the other columns of a prompt's row, as bytes of a JSON object
    rejected: list = field(default_factory=list)  # (row in the batch, reason, detail)
    notes: dict = field(default_factory=dict)  # {kind: {name: samples}}, by kind because a run may leave a kind out
    fatal: str = None


def parsed(row):
    if isinstance(row, bytes):
        return records.parse_text(row) if isinstance(row, records.Text) else records.parse_line(row)
    return records.want(records.want_json(row), dict, "the row")


def tell(record, documents):
    """Adds notes on a sample's tokens and rewards."""
    if record.kind == shards.PAIRS and np.array_equal(documents[0].ids, documents[1].ids):
        record.told.append("chosen and rejected are the same, which teaches nothing")
    if record.kind == shards.GROUPS and len({document.reward for document in documents}) == 1:
        record.told.append("all rewards of the group are equal, which teaches nothing")
    return record.told


def process(encoder, file, rows, checked):
    """Returns the Result of (number, line or object) rows; checks the masks of the first `checked`."""
    id_type = np.dtype("<u2" if shards.id_bytes_of(encoder.vocabulary) == 2 else "<u4")
    result = Result(None, None, None, None, [], [], [], [])
    ids, counts, values, tables, kinds, begin = [], [], [], [], collections.defaultdict(collections.Counter), 0
    for i, (number, row) in enumerate(rows):
        try:
            record, documents = encoder.understood(parsed(row))
            kind = record.kind
            if i < checked:
                for document in documents:
                    if len(document.ids) < MOST_CHECKED:
                        encoder.check(document)
        except records.Rejected as rejected:
            result.rejected.append((i, rejected.reason, rejected.detail))
            continue
        except (encode.MaskFailure, encode.SetupFailure) as failure:
            result.fatal = f"{file}:{number}: {failure}"
            break
        own_ids, own_counts, own_values, table = encode.pack(documents, id_type)
        table["begin"] += np.uint64(begin)
        begin += sum(map(len, own_ids))
        ids += own_ids
        counts += own_counts
        values += own_values
        tables.append(table)
        result.rows.append(i)
        result.kinds.append(kind)
        result.documents.append(len(documents))
        result.columns += [record.columns] * len(documents)
        notes = kinds[kind]
        notes.update([*record.noted(), *(f"unused {key}" for key in record.unused)])
        notes.update(f"told {text}" for text in set(tell(record, documents)))
        for document in documents:
            notes.update([f"label {bool(document.reward)}"] * (kind == shards.LABELS))
            for what, texts in (("counts", document.texts or ()), ("masked", document.others)):
                notes.update(f"{what} {text['role']}" for text in texts if isinstance(text, dict))
        notes["empty"] += any(document.empty for document in documents)
        notes["straddles"] += sum(document.straddles > 0 for document in documents)
        notes["truncated"] += sum(document.truncated for document in documents)
        notes["long"] += sum(0 < encoder.options.max_tokens < len(document.ids) for document in documents)
    result.ids = np.concatenate(ids) if ids else np.zeros(0, id_type)
    result.counts = np.concatenate(counts) if counts else np.zeros(0, np.uint8)
    if shards.ADVANTAGES in result.kinds:
        result.values = np.concatenate([np.zeros(len(c), np.float32) if v is None else v for v, c in zip(values, counts)])
    result.table = np.concatenate(tables) if tables else np.zeros(0, shards.TABLE)
    result.notes = {kind: {name: int(count) for name, count in notes.items()} for kind, notes in kinds.items()}
    return result


def work(connection, close, make_encoder):
    """Runs a worker. `close`: inherited descriptors to close, so that a reader sees the end of a pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in close:
        os.close(descriptor)
    global encoder
    encoder = encoder or make_encoder()
    try:
        while True:
            connection.send(process(encoder, *connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:  # a fault of this program, which the parent reports
        try:
            connection.send(WorkerFailure(f"{type(error).__name__}: {' '.join(str(error).split())}"))
        except OSError:
            pass


class Pool:
    """`make_encoder` is called here, and again in workers if processes cannot be forked."""

    def __init__(self, count, make_encoder, close=()):
        global encoder
        encoder = make_encoder()
        self.workers = []  # (process, connection)
        if count == 1:
            return
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        for _ in range(count):
            ours, theirs = context.Pipe()
            inherited = [*close, ours.fileno(), *(c.fileno() for _, c in self.workers)] if method == "fork" else []
            process_ = context.Process(target=work, args=(theirs, inherited, make_encoder), daemon=True)
            process_.start()
            theirs.close()
            self.workers.append((process_, ours))

    def results(self, batches, check):
        """Yields (batch, Result) in the order of the batches; checks the masks of the first `check` samples."""
        if not self.workers:
            for batch in batches:
                result = process(encoder, batch.file, batch.rows, check)
                check -= len(batch.rows)
                batch.rows = [number for number, _ in batch.rows]
                yield batch, result
            return
        batches, sent, wanted, waiting, done = iter(batches), 0, 0, {}, {}
        idle, busy, size = [c for _, c in self.workers], {}, 0
        exhausted = False
        while True:
            while idle and not exhausted and sent - wanted < 4 * len(self.workers) and (size < MOST_BYTES or not busy):
                batch = next(batches, None)
                if batch is None:
                    exhausted = True
                    break
                connection = idle.pop()
                self.send(connection, (batch.file, batch.rows, check))
                check -= len(batch.rows)
                batch.rows = [number for number, _ in batch.rows]  # a worker needs only these two ends
                busy[connection], waiting[sent] = sent, batch
                size, sent = size + batch.size, sent + 1
            if wanted in done:
                batch = waiting.pop(wanted)
                size -= batch.size
                yield batch, done.pop(wanted)
                wanted += 1
            elif busy:
                for connection in multiprocessing.connection.wait(list(busy)):
                    done[busy.pop(connection)] = self.receive(connection)
                    idle.append(connection)
            else:
                return

    def send(self, connection, work):
        try:
            connection.send(work)
        except OSError:
            self.refuse(connection)

    def receive(self, connection):
        try:
            result = connection.recv()
        except (EOFError, OSError):  # OSError: the worker ended within a message
            self.refuse(connection)
        if isinstance(result, WorkerFailure):
            raise result
        return result

    def refuse(self, connection):
        process_ = next(p for p, c in self.workers if c is connection)
        process_.join(5)
        raise WorkerFailure(f"a worker ended with status {process_.exitcode}, perhaps out of memory; try fewer --workers; "
                            "the same command continues") from None

    def close(self):
        for process_, connection in self.workers:
            connection.close()
            process_.terminate()
        for process_, _ in self.workers:
            process_.join()
        self.workers = []
