"""Writes the parts of one job's log, for the job's owner.

A control plane that has lost the job without knowing it may have at most one part in progress: before each part it
makes sure that it still has the job. The next owner writes a part with the same number and a higher stamp, which takes
precedence.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.kept_logs.parts import Mark, NoPart, PartName, Piece, counting, decode, encode
from workers.storage.files import files_of
from workers.storage.places import Place

PART_BYTES = 4 * 1024 * 1024
SMALL_BYTES = 1024 * 1024
MERGED_BYTES = 8 * 1024 * 1024
"""Maximum size of parts that are merged."""
SMALL_PARTS = 64
"""When this many small parts are at the end of a log, they are merged."""


class PartWriter:
    """The parts of one job. Raises OSError whenever the place does not do what it is asked; a request may be
    repeated."""

    def __init__(self, folder: Place):
        """`folder`: of the job's parts."""
        self._folder, self._files = folder, files_of(folder)
        self._sizes: dict[PartName, int] = {}
        self._stamp = 0
        self.pieces: dict[int, Piece] = {}
        """By rank, the last piece of its log."""

    def begin(self, epoch: int) -> None:
        """Find out what is there. `epoch`: of the lease under which parts are written."""
        try:
            names = self._files.names(self._folder)
        except FileNotFoundError:
            names = []
        every = [part for part in map(PartName.parse, names) if part is not None]
        parts = counting(names)
        sizes = dict(self._files.sizes(self._folder, map(str, parts)))
        if unknown := next((size for size in sizes.values() if isinstance(size, OSError)), None):
            raise unknown
        self.pieces = {rank: piece for rank, (piece, _) in self._read(parts[-1]).items()} if parts else {}
        self._sizes = {part: int(str(sizes[str(part)])) for part in parts}
        self._stamp = max([epoch, *(part.stamp + 1 for part in every)])

    @property
    def next_number(self) -> int:
        """Number of the next part."""
        return next(reversed(self._sizes)).last + 1 if self._sizes else 1

    @property
    def is_closed(self) -> bool:
        """Whether the last part was written when the job was over."""
        return bool(self._sizes) and next(reversed(self._sizes)).closes

    def mark(self, rank: int) -> Mark:
        """Mark of the last report of `rank` whose lines are stored."""
        return self.pieces[rank].mark if rank in self.pieces else (0, 0)

    def write(self, chunks: Mapping[int, tuple[Piece, bytes]], closes: bool = False) -> None:
        """Write one more part, of these ranks. If this has failed, it must be repeated with the same bytes."""
        still = {rank: (Piece(piece.end, piece.end, piece.mark), b"") for rank, piece in self.pieces.items()}
        whole = {**still, **chunks}
        content = encode(whole)
        part = PartName(self.next_number, self.next_number, self._stamp, closes)
        self._files.make_folder(self._folder)
        self._files.write_whole(self._folder / str(part), content)
        self._sizes[part] = len(content)
        self.pieces = {rank: piece for rank, (piece, _) in whole.items()}

    def merge(self, at_least: int = SMALL_PARTS) -> None:
        """Merge small parts at the end of the log if there are `at_least` that many. Everything that is merged existed
        when this control plane certainly had the job, so its next owner counts it too."""
        run = self._small_ones()
        if len(run) < at_least:
            return
        merged = _merged([self._read(part) for part in run])
        if merged is None:
            return
        content = encode(merged)
        whole = PartName(run[0].first, run[-1].last, self._stamp, run[-1].closes)
        self._files.write_whole(self._folder / str(whole), content)
        for part in run:
            del self._sizes[part]
        self._sizes[whole] = len(content)
        for part in filter(None, map(PartName.parse, self._files.names(self._folder))):
            if part != whole and whole.first <= part.first and part.last <= whole.last:
                self._files.remove(self._folder / str(part))

    def _small_ones(self) -> list[PartName]:
        run: list[PartName] = []
        total = 0
        for part, size in reversed(self._sizes.items()):
            total += size
            if size >= SMALL_BYTES or total > MERGED_BYTES:
                break
            run.insert(0, part)
        return run

    def _read(self, part: PartName) -> dict[int, tuple[Piece, bytes]]:
        try:
            return decode(self._files.read(self._folder / str(part)))
        except NoPart as error:
            raise OSError(f"{self._folder / str(part)}: {error}") from error


def _merged(parts: list[dict[int, tuple[Piece, bytes]]]) -> dict[int, tuple[Piece, bytes]] | None:
    """One part with the contents of these consecutive ones; None if bytes are missing in between."""
    merged: dict[int, tuple[Piece, list[bytes]]] = {}
    for part in parts:
        for rank, (piece, content) in part.items():
            before, contents = merged.get(rank, (Piece(piece.start, piece.start, piece.mark), []))
            if piece.start != before.end:
                return None
            merged[rank] = Piece(before.start, piece.end, piece.mark), [*contents, content]
    return {rank: (piece, b"".join(contents)) for rank, (piece, contents) in merged.items()}
