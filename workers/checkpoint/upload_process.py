"""`python -m manta.workers.checkpoint.upload_process DESCRIPTOR BYTES OPTIONS`: uploads files for the process that
starts it, from shared memory, so that neither checksums nor sockets hold the interpreter's lock during a training step.

Its stdin has, for each file, its URL as a line of JSON and then its pieces as `PIECE`s: a count of bytes that follow, a
range of the shared memory, and an end. Its stdout has a line of JSON for each block that the store's client has
accepted (`WROTE`), and then one with the checksums or the error. When stdin ends, or at SIGTERM, so does this process;
an upload in progress is aborted.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import sys
from collections.abc import Iterator
from typing import IO, Any, NoReturn

from manta.workers.checkpoint.checksums import BLOCK_BYTES, FileSums, SummedFiles
from manta.workers.errors import MantaError
from manta.workers.storage import object_files
from manta.workers.storage.locations import parse_location

PIECE = struct.Struct("<BQQ")
BYTES, MEMORY, END = range(3)
"""Kinds of pieces: (BYTES, count, 0) and then as many bytes; (MEMORY, offset, count); (END, 0, 0)."""
WROTE = b"{}\n"
NICER_BY = 5
"""Lets training go first if they share a core: about three times the weight (sched(7))."""


class _UploadAborted(Exception):
    """The requesting process is gone."""


def main(descriptor: int, size: int, options: dict[str, Any]) -> None:
    """Upload what is requested until there are no more requests."""
    os.nice(NICER_BY)
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    object_files.OPTIONS.update(options)
    serve(sys.stdin.buffer, sys.stdout.buffer, memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ)))


def _leave() -> NoReturn:
    """Exit, which aborts an upload in progress. The requester does not wait until the store has answered that."""
    null = os.open(os.devnull, os.O_RDWR)
    for ours in (sys.stdin.fileno(), sys.stdout.fileno()):
        os.dup2(null, ours)
    sys.exit()


def serve(requests: IO[bytes], answers: IO[bytes], memory: memoryview) -> None:
    """Answer all `requests`."""

    def answer(line: bytes) -> None:
        answers.write(line)
        answers.flush()

    while line := requests.readline():
        pieces = _pieces(requests, memory)
        try:
            sums = _upload(json.loads(line), pieces, lambda: answer(WROTE))
        except _UploadAborted:
            return
        except (OSError, RuntimeError, MantaError) as error:
            for _ in pieces:
                pass
            answer(json.dumps({"error": f"{error}" or type(error).__name__}).encode() + b"\n")
        else:
            answer(json.dumps({"sums": [sums.size, sums.blocks, sums.block_bytes]}).encode() + b"\n")


def _upload(url: str, pieces: Iterator[memoryview], wrote: Any) -> FileSums:
    files, file = SummedFiles(wrote), parse_location(url)
    with files.create(file) as stream:
        for piece in pieces:
            stream.write(piece)
    return files.sums[file.name]


def _pieces(requests: IO[bytes], memory: memoryview) -> Iterator[memoryview]:
    """Pieces up to the end of a file, each at most a block. Raises _UploadAborted."""
    while True:
        kind, first, second = PIECE.unpack(_read(requests, PIECE.size))
        if kind == END:
            return
        if kind == BYTES:
            yield memoryview(_read(requests, first))
        else:
            for at in range(first, first + second, BLOCK_BYTES):
                yield memory[at : min(at + BLOCK_BYTES, first + second)]


def _read(requests: IO[bytes], count: int) -> bytes:
    content = requests.read(count)
    if len(content) < count:
        raise _UploadAborted
    return content


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
