"""Activation recomputation (Korthikanti et al., arXiv:2205.05198, section 5): activations that forward drops and
backward recomputes. Here is what is recomputed, and of which micro-batches, in pure Python; `modules` recomputes it.

| dropped | kept instead | how it comes back in backward |
| --- | --- | --- |
| core attention, written out | q, k, v, kept anyway | q k^T, softmax and mask, in the attention's own backward |
| core attention, fused kernel | q, k, v, kept anyway | the whole kernel, by `checkpointed` |
| outputs of the norms | their inputs, kept anyway | the norm, in backward of the product that took its output |
| output of GELU | its input, kept anyway | GELU, in backward of the product that took its output |
| a whole layer (`full`) | the layer's input | the layer's forward, by `checkpointed` |

- `none`: everything is kept.
- `selective`: in every layer the outputs of `recompute_modules` are dropped: those that are large for what they cost
  to compute (the paper drops core attention only).
- `full`: of every `recompute_every`-th layer, from layer 0, only the input is kept; of the others everything.

Either applies to the micro-batches that do not fit into the window of `recompute_keep` (appendix C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manta.workers.config import ParallelConfig
from manta.workers.schedules.schedule import Action

OFFLOADED_BYTES = 2**20
"""Smallest tensor in bytes that is offloaded: for smaller ones a copy costs too much."""


def is_offloaded(position: int, layers: int, count: int) -> bool:
    """Whether the layer at `position` of a stage's `layers` is one of the `count` offloaded ones. These are spread out,
    so that copies overlap with the layers in between; the last layer, whose backward comes first, is offloaded only if
    all are."""
    layers_after, count = layers - 1 - position, min(count, layers)
    return (layers_after + 1) * count // layers != layers_after * count // layers


@dataclass(frozen=True)
class Recompute:
    """What is dropped in forward and recomputed in backward for one micro-batch; by default nothing."""

    core_attention: bool = False
    """Softmax, dropout mask and dropped-out weights of every layer; with fused kernels their log-sums."""
    norm: bool = False
    """Outputs of every layer's norms."""
    mlp_activation: bool = False
    """Output of every layer's GELU."""
    every: int = 0
    """k: every k-th layer is recomputed as a whole; 0: none."""

    @classmethod
    def of(cls, layout: ParallelConfig) -> Recompute:
        """The policy of `layout`, for a micro-batch that it applies to."""
        if layout.recompute == "full":
            return cls(every=layout.recompute_every)
        if layout.recompute == "selective":
            return cls(**dict.fromkeys(layout.recompute_modules, True))
        return NOTHING

    def full_layer(self, index: int) -> bool:
        """Whether layer `index` of the model is recomputed as a whole."""
        return self.every > 0 and index % self.every == 0


NOTHING = Recompute()


def recomputed(actions: Sequence[Action], layout: ParallelConfig) -> frozenset[tuple[int, int]]:
    """(micro-batch, chunk) pairs of one rank's `actions` to which the policy of `layout` applies (arXiv:2205.05198,
    appendix C).

    A rank keeps everything of at most `layout.recompute_keep` micro-batches at any time (each has as many pairs as
    the rank has chunks): a pair whose forward finds that many kept is recomputed, so the kept ones move through the
    step like a window.
    """
    if layout.recompute == "none":
        return frozenset()
    return recomputed_pairs(actions, layout.recompute_keep * layout.virtual_stages)


def recomputed_pairs(actions: Sequence[Action], max_kept: int) -> frozenset[tuple[int, int]]:
    """(micro-batch, chunk) pairs of a rank's `actions` that are recomputed if at most `max_kept` are kept at any
    time."""
    kept: set[tuple[int, int]] = set()
    dropped: set[tuple[int, int]] = set()
    for action in actions:
        pair = (action.micro_batch, action.chunk)
        if action.kind == "forward":
            (kept if len(kept) < max_kept else dropped).add(pair)
        elif action.kind in ("backward", "backward_weight"):
            kept.discard(pair)
    return frozenset(dropped)
