"""Device memory of jobs with experts for other numbers of rows than plans expect (`activation_bytes.planned_rows`), as
in the worst case. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from manta.workers.accounting.activation_bytes import ExpertRows, worst_rows
from manta.workers.accounting.device_bytes import bytes_of_stage
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.config import JobSpec

NO_ROWS = ExpertRows(0, 0, 0)


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
