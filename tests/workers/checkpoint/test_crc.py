"""Checkpoints can be checked with and without zlib-ng: the numbers are the same."""

from __future__ import annotations

import subprocess
import sys
import zlib

import pytest

from manta.workers.checkpoint.checksums import crc32

CONTENT = bytes(n % 253 for n in range(100_000))


@pytest.mark.parametrize("pieces", [(CONTENT,), (CONTENT[:5], CONTENT[5:5], memoryview(CONTENT)[5:])])
def test_crc_equals_that_of_pythons_zlib(pieces):
    number = 0
    for piece in pieces:
        number = crc32(piece, number)
    assert number == zlib.crc32(CONTENT)


def test_crc_falls_back_to_pythons_zlib_without_zlib_ng():
    program = (
        "import sys; sys.modules['zlib_ng'] = None; from manta.workers.checkpoint import checksums; "
        "print(checksums.crc32.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "zlib\n", done.stderr
