"""A plan as a JSON document. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from manta.service.planner import explain
from manta.service.planner.beside_steps import beside_steps
from manta.service.planner.hardware import Cluster, Machine, parts_of
from manta.service.planner.memory import host_bytes
from manta.service.planner.refinement import moved
from manta.service.planner.request import PlanRequest
from manta.service.planner.search import Answer, Plan
from manta.service.planner.sizes import best_by_nodes, best_by_size, elastic_sizes
from manta.service.planner.software import engine_on
from manta.service.planner.step_time import step_model
from manta.workers.accounting.device_bytes import worst_bytes
from manta.workers.accounting.flops import adapters_in_words

ASSUMED = (
    "estimates use default efficiency for this hardware: use them to compare layouts, and run `manta calibrate` there "
    "for realistic times"
)

LINKS_ASSUMED = (
    "the speed of the GPUs was measured; that of the links between them is a default, which was not measured"
)


OTHER_FORM = (
    "the rates are those of {device}, which was calibrated and has the name {name} here; memory, and links that were "
    "not measured, are those of an SXM GPU of that name"
)

WAITS_ASSUMED = (
    "the speed of the GPUs and of the links inside a node was measured; {what} is a default, which was not measured"
)


def note_on(cluster: Cluster) -> str | None:
    """What to know about estimates for this cluster; None: nothing."""
    gpus, nodes = (sum(each) for each in zip(*((part.gpus, part.nodes) for part in cluster.parts), strict=True))
    notes = [(part.type, note) for part in cluster.parts for note in _notes_of(part.machine, gpus > 1, nodes > 1)]
    return "; ".join(f"{type}: {note}" if cluster.others else note for type, note in notes) or None


def _notes_of(machine: Machine, several: bool, several_nodes: bool) -> Iterator[str]:
    """`several`: whether there are several GPUs."""
    name = machine.accelerator.name
    if machine.measured_on is not None:
        yield OTHER_FORM.format(device=machine.measured_on, name=name)
    if machine.refined is not None:
        factors = ", ".join(f"{constant} x {factor:.2f}" for constant, factor in moved(machine).items())
        jobs = f"{machine.refined.jobs} jobs that ran on such machines"
        yield f"the assumed constants of {name} were refined by {jobs}: {factors}"
    elif machine.is_assumed:
        yield ASSUMED
    elif several and machine.links_are_assumed:
        waits = "how long they wait for one another"
        what = f"that of the links between nodes, and {waits}," if several_nodes else waits
        yield LINKS_ASSUMED if machine.links is None else WAITS_ASSUMED.format(what=what)


def to_json(request: PlanRequest, answer: Answer) -> dict[str, Any]:
    """In the form of `manta.api.schemas.Plans`."""
    trained = None if request.job.train.lora is None else adapters_in_words(request.job)
    return {
        "note": "; ".join(filter(None, (note_on(request.cluster), trained))) or None,
        "plans": [_plan(plan, request) for plan in answer.plans],
        "rejected": [
            {"parallel": each.spec.layout.model_dump(mode="json"), "reason": each.reason} for each in answer.rejected
        ],
        "explanation": explain.to_json(explain.explain(answer.plans[0], request.cluster))
        if request.explain and answer.plans
        else None,
        "sizes": _sizes(request) if request.sizes and answer.plans else None,
    }


def _sizes(request: PlanRequest) -> list[dict[str, Any]]:
    job, cluster = request.job, request.cluster
    if not request.is_auto:
        plans = elastic_sizes(job, cluster)
    elif cluster.others:
        plans = best_by_nodes(job, cluster)
    else:
        plans = best_by_size(job, cluster, engine_on(cluster.machine))
    return [plan.to_json() for plan in plans]


def _plan(plan: Plan, request: PlanRequest) -> dict[str, Any]:
    spec, seconds, flops = plan.spec, plan.time.seconds, plan.flops
    tokens = spec.train.global_batch_size * spec.model.sequence_length
    model, hardware = plan.rate(flops.model_full), plan.rate(flops.hardware_full)
    beside = beside_steps(step_model(spec, request.cluster), plan.time)
    hours = (seconds * spec.train.steps + beside.seconds) / 3600
    return {
        "parallel": spec.layout.model_dump(mode="json"),
        "micro_batch_size": spec.train.micro_batch_size,
        "precision": spec.train.precision,
        "gpus": spec.layout.world_size,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops_per_gpu": model / 1e12,
        "hardware_tflops_per_gpu": hardware / 1e12,
        "mfu_full": model / plan.peak_flops,
        "mfu_causal": plan.rate(flops.model_causal) / plan.peak_flops,
        "hfu_full": hardware / plan.peak_flops,
        "bubble_ratio": plan.time.bubble_ratio,
        "memory_bytes": plan.memory.parts(),
        "worst_memory_bytes": worst_bytes(spec, request.cluster.machine.has_gpus),
        "host_memory_bytes": max(host_bytes(spec, each.gpus_per_node) for each in parts_of(spec, request.cluster)),
        "step_parts": {
            "pipeline": plan.time.pipeline,
            "gradients": plan.time.gradients,
            "tied_embedding": plan.time.tied,
            "optimizer": plan.time.optimizer,
            "waiting": plan.time.waiting,
        },
        "beside_steps": beside.to_json(),
        "hours": hours,
        "gpu_hours": hours * spec.layout.world_size,
    }
