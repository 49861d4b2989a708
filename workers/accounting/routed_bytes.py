"""Device memory of jobs with experts for other numbers of rows than plans expect (`activation_bytes.planned_rows`): for
counted tokens, and for the worst case. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from manta.workers.accounting.activation_bytes import ExpertRows, rows_of_share, worst_rows
from manta.workers.accounting.device_bytes import bytes_of_stage
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.config import JobSpec

NO_ROWS = ExpertRows(0, 0, 0)


def counted_rows(spec: JobSpec, tokens: Sequence[Sequence[int]]) -> tuple[ExpertRows, ...]:
    """For each layer, rows of the rank with most, if a full micro-batch is spread over experts like `tokens`, [layers
    with experts, experts]: those of a step, for example."""
    rows, size = [NO_ROWS] * spec.model.layers, spec.layout.expert_size
    for layer, counts in zip(spec.model.expert_layers, tokens, strict=True):
        each, total = len(counts) // size, max(1, sum(counts))
        ranks = [counts[first : first + each] for first in range(0, len(counts), each)]
        busiest = max(ranks, key=sum)
        rows[layer] = rows_of_share(spec, sum(busiest) * size / total, max(busiest) * len(counts) / total)
    return tuple(rows)


def bytes_for(spec: JobSpec, rows: Sequence[ExpertRows], gpu: bool = True) -> int:
    """Most device memory of a rank in a step, in bytes, if its experts get so many `rows` in each layer; on a `gpu` or
    not."""
    passes = StepPeak(spec, gpu, rows=rows)
    return max(bytes_of_stage(passes, stage, spec.micro_batches).total for stage in range(spec.layout.pipeline))


def worst_bytes(spec: JobSpec, gpu: bool = True) -> int | None:
    """`bytes_for` the worst case: all tokens of a group go to the experts of one rank. None if experts are not spread
    over ranks, so that there is no such case."""
    if spec.layout.expert_size == 1 or spec.model.moe is None:
        return None
    worst, model = worst_rows(spec), spec.model
    return bytes_for(spec, [worst if model.has_experts(layer) else NO_ROWS for layer in range(model.layers)], gpu)
