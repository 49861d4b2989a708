"""Indexed datasets as Megatron-LM writes them, for tests."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

DOCUMENTS = [[[1, 2, 3]], [[4], [], [5, 6]], [[7, 8, 9, 10]]]


def megatron_dataset(prefix: Path, documents: list[list[list[int]]], code: int = 8, kind: str = "<u2") -> str:
    """Written by the description of `_IndexWriter` in Megatron-LM's indexed_dataset.py, field by field. `documents`: of
    sequences of tokens."""
    sequences = [sequence for document in documents for sequence in document]
    content = b"".join(np.array(sequence, kind).tobytes() for sequence in sequences)
    Path(f"{prefix}.bin").write_bytes(content)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    at = 0
    for sequence in sequences:
        index += struct.pack("<q", at)
        at += len(sequence) * np.dtype(kind).itemsize
    first = 0
    index += struct.pack("<q", 0)
    for document in documents:
        first += len(document)
        index += struct.pack("<q", first)
    Path(f"{prefix}.idx").write_bytes(index)
    return str(prefix)
