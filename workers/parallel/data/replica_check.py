"""Checks that parameters that must be bit-identical on several ranks are.

Three groups of ranks hold equal parameters: all replicas of a stage hold the same everywhere (under ZeRO 3: of what is
whole on each of them; of spread experts, those that have the same ones), its tensor ranks hold the same of what is not
split over them, and the first and last stage hold the same embedding where it is tied. Each rank hashes what it has;
who differs is decided by a pure function of the hashes, so that all ranks come to the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import Axis
from manta.workers.parallel.data.flat import Range
from manta.workers.parallel.data.reduction import holders_of
from manta.workers.parallel.data.zero import ZeroOptimizer

BLOCK_WORDS = 2**17
"""8-byte words that are hashed at once."""
BLOCK_ELEMENTS = 2**22
"""Elements of a rank's weights that are compared with another copy at once: a whole copy would double their memory on
the GPU, in a step long after those that show whether the job fits."""
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
UNKNOWN, SOUND, UNSOUND = 0, 1, 2


def multipliers(device: torch.device) -> torch.Tensor:
    """One odd number for each position in a block, int64."""
    places = torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device)
    return (places * _MULTIPLIER).bitwise_or_(1)


def hash_of(vectors: Iterable[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of these tensors, which begin and end at multiples of 8 bytes: int64 scalar.

    It is the sum of the words, each times an odd number for its position, modulo 2^64; blocks are chained by another
    odd number. Any change of a single word, such as a flipped bit, certainly changes the hash; other changes escape
    with a probability of about 2^-64.
    """
    digest = torch.zeros((), dtype=torch.int64, device=weights.device)
    for vector in vectors:
        for words in vector.view(torch.int64).split(BLOCK_WORDS):
            digest = digest * _MULTIPLIER + (words * weights[: len(words)]).sum()
    return digest


def outliers(hashes: Mapping[int, Hashable], sound: Mapping[int, int]) -> tuple[set[int], bool]:
    """Of ranks whose `hashes` should be equal, those that differ, and whether that is certain.

    `sound`: UNSOUND ranks know that their own part has changed, SOUND ones know that theirs has not, which makes their
    hash the right one. Otherwise the majority is right; without a majority all ranks are named.
    """
    counts = Counter(hashes.values())
    if len(counts) <= 1:
        return set(), True
    changed = {rank for rank in hashes if sound.get(rank) == UNSOUND}
    if changed:
        return changed, True
    right = {hashes[rank] for rank in hashes if sound.get(rank) == SOUND}
    if len(right) != 1:
        (most, votes) = counts.most_common(1)[0]
        right = {most} if 2 * votes > len(hashes) else set()
    return {rank for rank in hashes if hashes[rank] not in right}, bool(right)


class ReplicaCheck:
    """Compares one rank's parameters with those of the others. All ranks call it at the same steps."""

    def __init__(self, optimizer: ZeroOptimizer, comm: Comm):
        self.optimizer, self.flat, self.comm = optimizer, optimizer.flat, comm
        self._weights: torch.Tensor | None = None
        self._shared: dict[Axis, list[Range]] = {
            "tensor": self.flat.same_on_tensor_ranks(),
            "embedding": self.flat.same_on_both_ends(),
        }
        buckets = [*self.flat.buckets, *self.flat.frozen_buckets]
        self._axes = list(dict.fromkeys(holders_of(self.flat, bucket, comm) for bucket in buckets))

    def differing(self, kept: Sequence[torch.Tensor] | None) -> tuple[list[int], bool]:
        """The ranks whose parameters differ from those of ranks that should hold the same, and whether it is certain
        that these are the changed ones. `kept`: another copy of this rank's part of the weights (`state`) of the same
        step, if there is one. Raises PeerLost."""
        if self._weights is None:
            self._weights = multipliers(self.flat.parameters.device)
        world = self.comm.size("world")
        named = torch.zeros(2, world, dtype=torch.int64, device=self.flat.parameters.device)
        sound = self._own_verdict(kept)
        if sound == UNSOUND:
            named[0, self.comm.rank] = 1
        of_replicas = [self._of_replicas(axis, sound) for axis in self._axes]
        for odd, certain in (*of_replicas, self._of_group("tensor"), self._of_group("embedding")):
            for rank in odd:
                named[0 if certain else 1, rank] = 1
        self.comm.all_reduce("world", named)
        certain_ones, others = (torch.nonzero(row).flatten().tolist() for row in named.cpu())
        self.comm.confirm()
        return (certain_ones, True) if certain_ones else (others, False)

    def _hash(self, ranges: Sequence[Range]) -> torch.Tensor:
        assert self._weights is not None
        return hash_of((self.flat.values.of(start, end) for start, end in ranges), self._weights)

    def _of_group(self, axis: Axis) -> tuple[set[int], bool]:
        ranges = self._shared[axis]
        if self.comm.size(axis) == 1 or not ranges:
            return set(), True
        hashes = self.comm.all_gather(axis, self._hash(ranges).view(1)).tolist()
        ranks = self.comm.grid.group(axis, self.comm.rank)
        return outliers(dict(zip(ranks, hashes, strict=True)), {})

    def _of_replicas(self, axis: Axis, sound: int) -> tuple[set[int], bool]:
        """Each replica's part of what is held along `axis` is compared separately: the rank that keeps its state can
        tell whether it has changed."""
        size = self.comm.size(axis)
        if size == 1:
            return set(), True
        parts = [self._everywhere(axis, replica) for replica in range(size)]
        hashes = [self._hash(ranges) for ranges in parts]
        own_hashes = torch.stack([*hashes, hashes[0].new_tensor(sound)])
        gathered = self.comm.all_gather(axis, own_hashes).view(size, size + 1).tolist()
        ranks = self.comm.grid.group(axis, self.comm.rank)
        by_certainty: dict[bool, set[int]] = {True: set(), False: set()}
        sharded = self.optimizer.held == self.optimizer.owned
        for part in range(size):
            sure = {rank: gathered[at][size] for at, rank in enumerate(ranks) if at == part or not sharded}
            odd, certain = outliers({rank: gathered[at][part] for at, rank in enumerate(ranks)}, sure)
            by_certainty[certain] |= odd
        return (by_certainty[True], True) if by_certainty[True] else (by_certainty[False], False)

    def _everywhere(self, axis: Axis, replica: int) -> list[Range]:
        """What number `replica` along `axis` answers for and all along it hold."""
        flat = self.flat
        if axis == "expert_holders":
            replica *= flat.expert
        trained, frozen = flat.parts(replica), flat.frozen_parts(replica)
        if flat.zero == 3:
            return [trained[-1], *(part for part in frozen if part[0] >= flat.frozen_tail)]
        pairs = zip((*trained, *frozen), (*flat.buckets, *flat.frozen_buckets), strict=True)
        return [part for part, bucket in pairs if holders_of(flat, bucket, self.comm) == axis]

    def _own_verdict(self, kept: Sequence[torch.Tensor] | None) -> int:
        """SOUND if this rank's own part of the parameters still equals its state and, if there is one, the other copy
        of it that was kept; UNSOUND if not; UNKNOWN if there is nothing to compare it with."""
        published = [self.flat.values.of(start, end) for start, end in self.optimizer.held]
        if any(not same_bits(a, b) for a, b in zip(published, self.optimizer.parameters, strict=True)):
            return UNSOUND
        frozen = self.optimizer.frozen
        if kept is None:  # without master weights the parameters are the state itself
            return SOUND if self.optimizer.has_masters and not frozen else UNKNOWN
        pairs = zip([*self.optimizer.parameters, *frozen], kept, strict=True)
        return SOUND if all(same_bits(part, old) for part, old in pairs) else UNSOUND


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two vectors have the same bits, the second one converted to the dtype of the first."""
    pairs = zip(first.detach().split(BLOCK_ELEMENTS), second.detach().split(BLOCK_ELEMENTS), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.to(a.dtype).to(a.device).view(torch.uint8)) for a, b in pairs)
