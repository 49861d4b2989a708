"""Memory of sums with `train.deterministic: elastic`, in addition to the gradients and the buffers in which sums wait:
for what replicas send each other at the end of a step, bucket by bucket (`workers/parallel/data/elastic_sums.py`), and
for half-made gradients (`leaf_sums.py` there). Pure Python."""

from __future__ import annotations

from workers.accounting.flops import (
    key_value_copies,
    layers_of_rank,
    padded_vocabulary,
    parameters_of_rank,
    stages_held,
)
from workers.config import JobSpec
from workers.data.batch_plan import BatchPlan, leaf_share
from workers.parallel.data.tree_sum import cover
from workers.parallel.pipeline.schedules import SPLIT_BACKWARD, schedule
from workers.spec.parameters import TOKEN_EMBEDDING, frozen_names

WIDE = 4
"""Bytes of an element of gradients."""


def arriving_bytes(spec: JobSpec, stage: int, gpu: bool) -> int:
    """Most bytes that other replicas' sums of one bucket take on a rank of this stage; on a `gpu` or not."""
    replicas, nodes = spec.layout.data, _nodes_of_others(spec)
    if not nodes:
        return 0
    trained, tail = parameters_of_rank(spec, stage), _tail(spec, stage)
    head = min(int(spec.layout.bucket_bytes(gpu)) // WIDE, trained - tail)
    return WIDE * max(head, tail) // replicas * nodes


def halves_bytes(spec: JobSpec, stage: int, micro_batches: int) -> int:
    """Most bytes of half-made gradients of the tied embedding on a rank of this stage, if it has both ends of the
    model: passes of other micro-batches come between the two halves."""
    model, layout = spec.model, spec.layout
    held, last = stages_held(spec, stage), layout.pipeline * layout.virtual_stages - 1
    if spec.train.deterministic == "layout" or not model.tie_embeddings or not (0 in held and last in held):
        return 0
    if TOKEN_EMBEDDING in frozen_names(spec):
        return 0
    split = layout.schedule in SPLIT_BACKWARD
    of_table = ("backward_weight" if split else "backward", held.index(0))
    of_output = ("backward_input" if split and spec.train.head_tokens else of_table[0], held.index(last))
    if of_table == of_output:
        return 0
    made: set[int] = set()
    most = 0
    for action in schedule(layout.schedule, layout.pipeline, layout.virtual_stages, micro_batches)[stage]:
        if (action.kind, action.chunk) in (of_table, of_output):
            made ^= {action.micro_batch}
            most = max(most, len(made))
    return WIDE * most * padded_vocabulary(spec) // layout.tensor * model.hidden_size


def _nodes_of_others(spec: JobSpec) -> int:
    """Most sums that all other replicas together send to one; each has the size of its part of a bucket."""
    if spec.train.deterministic == "layout" or spec.layout.data == 1:
        return 0
    most = 0
    for level in BatchPlan(spec.train).levels:
        leaves = -(-level.size // spec.train.micro_batch_size)
        shares = [leaf_share(leaves, spec.layout, replica) for replica in range(spec.layout.data)]
        counts = [len(cover(leaves, share.start, share.stop)) for share in shares]
        most = max(most, sum(counts) - min(counts))
    return most


def _tail(spec: JobSpec, stage: int) -> int:
    """Elements of the last bucket except vectors (`workers/parallel/data/flat.py`): the table that another stage holds
    too, positions, and keys and values that several tensor ranks hold."""
    model, layout, h = spec.model, spec.layout, spec.model.hidden_size
    held, last = stages_held(spec, stage), layout.pipeline * layout.virtual_stages - 1
    is_shared = model.tie_embeddings and (0 in held) != (last in held)
    elements = padded_vocabulary(spec) // layout.tensor * h if is_shared else 0
    if 0 in held and not model.parts.rotary:
        elements += model.sequence_length * h
    copies = key_value_copies(model, layout.tensor)
    if copies > 1:
        values = 2 * model.key_value_heads * model.head_size * copies // layout.tensor
        elements += layers_of_rank(spec, stage) * values * h
    return elements
