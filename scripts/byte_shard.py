"""Writes a shard of texts whose tokens are bytes, for grpo_demo.py, agent_demo.py and passkey_demo.py. Needs numpy."""

import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
import numpy as np  # noqa: E402
import shards  # noqa: E402


def write_shard(folder, stem, samples, columns=None):
    """samples: a text and the counts of its bytes each; 1: the byte is trained on. The prompt ends before the first of them. columns: the
    other columns of each sample's row, objects; then the texts are prompts."""
    writer = shards.ShardWriter(folder, stem, shards.PROMPTS if columns else shards.DOCUMENTS, 256, 0, "bytes", 1 << 30)
    for i, (text, counts) in enumerate(samples):
        ids = np.frombuffer(text.encode(), np.uint8).astype("<u2")
        counts = np.array(counts, np.uint8)
        table = np.zeros(1, shards.TABLE)
        table["tokens"], table["counted"], table["prompt"] = len(ids), counts.sum(), (*np.flatnonzero(counts), len(ids))[0]
        table["crc"] = shards.document_crc(ids, counts)
        writer.add(ids, counts, table, [1], columns=[json.dumps(columns[i]).encode()] if columns else None)
    path = writer.path()
    writer.close()
    os.rename(path + ".tmp", path)
    for name in writer.old:
        os.remove(name)
