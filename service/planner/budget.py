"""Where the seconds of a planned step go, starting from the device's peak rate, and what would help. Pure Python.

The parts of a rank's passes are means over all ranks; the time that ranks wait for each other, in bubbles and behind
stages with more layers, is a part of its own. All parts together are the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from manta.service.planner.candidates import METHODS
from manta.service.planner.operations import Budget
from manta.service.planner.pipeline import ROUNDING
from manta.service.planner.step_time import StepModel, StepTime
from manta.workers.accounting.flops import step_flops
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.one_forward_one_backward import INTERLEAVED
from manta.workers.spec.divisors import divisors
from manta.workers.spec.rules import broken_keys

MIN_REPORTED_SHARE = 0.04
"""Smallest part of a step that gets a sentence."""


@dataclass(frozen=True)
class Share:
    """One part of a step."""

    name: str
    seconds: float
    what: str
    """What it is, in a few words."""
    help: str
    """What would make it smaller; empty where nothing does."""


def step_shares(model: StepModel, time: StepTime, peak_flops: float) -> tuple[Share, ...]:
    """The parts of a step that takes `time`; at `peak_flops` a device would take only the first part. They add up to
    the step's seconds. The part of products may be negative, since kernels may leave out work that the FLOP count
    includes."""
    spec, mean = model.spec, _mean_passes(model)
    flops = step_flops(spec)
    counted = flops.model_full if spec.attention_is_explicit else flops.model_causal
    ideal = counted / spec.layout.world_size / (_peak_of_rank(model) or peak_flops)
    passes = mean.seconds
    # Each rank casts its own weights; the rest is waiting for the others.
    casts = model.cast_seconds() / spec.layout.pipeline
    bubble = time.pipeline - passes - model.first_wait() - casts
    seconds = {
        "arithmetic": ideal,
        "products": mean.products + mean.attention - ideal,
        "elementwise": mean.elementwise + mean.accumulation + casts,
        "recomputation": mean.recomputation,
        "tensor": mean.tensor,
        "host": mean.host + mean.stalls + model.first_wait(),
        "bubble": 0.0 if abs(bubble) < ROUNDING * time.pipeline else bubble,
        "gradients": time.gradients + time.tied,
        "optimizer": time.optimizer,
        "replicas": time.waiting,
    }
    if mean.copies:
        seconds["copies"] = mean.copies
    if mean.context:
        seconds["context"] = mean.context
    if mean.expert:
        seconds["expert"] = mean.expert
    words = _words(model)
    if time.tied > time.gradients:
        words["gradients"] = (
            "the embedding's gradients, which the first and the last stage hold",
            "model.tie_embeddings: false",
        )
    return tuple(Share(name, each, *words[name]) for name, each in seconds.items())


def _peak_of_rank(model: StepModel) -> float | None:
    """FLOP/s of a rank's part of the cores that this job's ranks share; None where each has a device."""
    cores, core = model.cores(), model.cluster.machine.core
    if cores is None or core is None:
        return None
    own = cores.count / (model.spec.layout.world_size * cores.threads)
    return core.product_rate(model.layer.width) * cores.threads * min(1.0, own)


def _mean_passes(model: StepModel) -> Budget:
    """Passes of a whole step on one rank, as the mean over the pipeline's ranks."""
    layout = model.spec.layout
    total = Budget()
    for index in range(layout.pipeline * layout.virtual_stages):
        for each in model.budgets_of(index):
            total = total.plus(each)
    cores = model.cores()
    alone = 1.0 if cores is None else cores.speed(layout.pipeline)
    return Budget().plus(total, model.spec.micro_batches / layout.pipeline / alone)


def _words(model: StepModel) -> dict[str, tuple[str, str]]:
    """What each part is, and what would help: of the changes that the job's rules and sizes leave possible."""
    spec, layout, micro_batch = model.spec, model.spec.layout, model.spec.train.micro_batch_size
    replicas = f"{layout.data} replicas" if layout.data > 1 else "one replica"
    holders = replicas if layout.context == 1 else f"{layout.holders} ranks with the same parameters"
    # One that does not divide a replica's samples leaves a micro-batch incomplete, which takes as long as the others.
    sizes = (size for size in divisors(-(-spec.train.global_batch_size // layout.data)) if size > micro_batch)
    is_allowed = any(_breaks_nothing(spec, "train", micro_batch_size=size) for size in sizes)
    larger = "a larger micro-batch" if is_allowed else ""
    smaller = "a smaller micro-batch" if micro_batch > 1 else ""
    narrower = "a smaller tensor size" if layout.tensor > 1 else ""
    has_layers = spec.model.layers > layout.pipeline * layout.virtual_stages
    fewer = "fewer replicas" if layout.data > 1 else ""
    may_compile = not spec.train.compile and _breaks_nothing(spec, "train", compile=True)
    compiled = "train.compile: true" if may_compile else ""
    products, less = _either(larger, narrower), _either(smaller, "more stages" if has_layers else "")
    without = "less recomputation, where memory allows"
    dispatch = "" if spec.model.moe is None else layout.dispatch(spec.model.moe.per_token)
    full = "parallel.recompute: full in addition" if layout.recompute != "full" else ""
    return {
        "arithmetic": ("the model's FLOPs at the device's peak rate", ""),
        "products": (
            "matmuls and attention, beyond the time at the peak rate",
            f"larger matmuls: {products}" if products else "",
        ),
        "elementwise": ("norms, activations, residuals and losses, limited by memory bandwidth", compiled),
        "recomputation": (
            f"recomputing activations ({layout.recompute})",
            f"{without}: {less}" if less else without,
        ),
        "tensor": (
            f"communication of {layout.tensor} tensor-parallel ranks",
            f"{narrower} with more pipeline stages" if narrower and has_layers else narrower,
        ),
        "context": (
            f"communication of {layout.context} context-parallel ranks ({layout.context_method or METHODS[0]})",
            _either(*_less_context(spec)),
        ),
        "expert": (
            f"sending tokens to the {layout.exchange_size} ranks of their experts, and results back ({dispatch})",
            _either(*_less_dispatch(spec)),
        ),
        "copies": (
            f"copying activations of {layout.offload_layers} layers a stage to host memory and back",
            _either("fewer parallel.offload_layers", full),
        ),
        "host": ("waiting for the host to launch kernels", _either(larger, compiled)),
        "bubble": _bubble(model, _either("a larger global batch", smaller, fewer)),
        "gradients": _words_of_reductions(layout, holders, _either(larger, fewer, "a larger batch")),
        "optimizer": _words_of_update(model, holders),
        "replicas": (f"waiting for the slowest of {replicas}", fewer),
    }


def _less_context(spec: JobSpec) -> Iterator[str]:
    """What makes context ranks communicate less: of the other methods, those that the job may use."""
    layout = spec.layout
    if layout.data < spec.train.global_batch_size:
        yield "a smaller context size with more replicas"
    for method in METHODS:
        if method != (layout.context_method or METHODS[0]) and _breaks_nothing(spec, "parallel", context_method=method):
            yield f"parallel.context_method: {method}"


def _less_dispatch(spec: JobSpec) -> Iterator[str]:
    """What makes expert-parallel ranks communicate less."""
    if spec.layout.exchange_size > 1:
        yield "a smaller parallel.expert, where memory allows"
        yield "one whose ranks share a node (fewer pipeline stages or a smaller tensor size bring them together)"


def _words_of_reductions(layout: ParallelConfig, holders: str, less: str) -> tuple[str, str]:
    """`less`: what makes fewer of them, or gives them more to overlap with."""
    what = "gradient reductions" if layout.zero < 3 else "gathers of weights and gradient reductions"
    helps = less if layout.zero < 2 else f"{less}, or parallel.zero: 1 where memory allows"
    return f"{what} over {holders} that do not overlap with computing", helps


def _either(*ways: str) -> str:
    """One of those that there are."""
    *others, last = [way for way in ways if way] or [""]
    return f"{', '.join(others)}, or {last}" if others else last


def _breaks_nothing(spec: JobSpec, section: str, **values: object) -> bool:
    """Whether a change breaks no rule that the job does not break."""
    other = spec.model_copy(update={section: getattr(spec, section).model_copy(update=values)})
    return not broken_keys(other) - broken_keys(spec)


def _bubble(model: StepModel, ways: str) -> tuple[str, str]:
    """`ways`: what gives each replica more micro-batches."""
    layout, work = model.spec.layout, model.pipeline().rank_work()
    what = f"waiting for other stages ({layout.schedule}, pipeline {layout.pipeline}"
    helps = f"more micro-batches: {ways}"
    if not SCHEDULES[layout.schedule].splits_backward:
        more = {"schedule": INTERLEAVED.name, "virtual_stages": layout.virtual_stages + 1, "stage_layers": None}
        chunks = "more virtual stages" if _breaks_nothing(model.spec, "parallel", **more) else ""
        helps += f"; {_either('a zero-bubble schedule', chunks)}"
    most = max(work) * len(work) / sum(work) - 1
    if most < MIN_REPORTED_SHARE:
        return f"{what})", helps
    what += f", where rank {work.index(max(work))} has {most:.0%} more work than the mean)"
    return what, f"{helps}; fewer layers on that rank (parallel.stage_layers)"


def _words_of_update(model: StepModel, replicas: str) -> tuple[str, str]:
    layout = model.spec.layout
    if model.spec.train.optimizer.offload:
        return (
            f"the update, with its state copied from host memory and back, and sending it to {replicas}",
            "a larger global batch, or train.optimizer.offload: false where memory allows",
        )
    fewer = "a larger global batch, so that there are fewer updates"
    helps = fewer if layout.zero or layout.holders == 1 else "parallel.zero: 1"
    return f"the update, and sending it to {replicas}", helps


def sentences(shares: tuple[Share, ...]) -> tuple[str, ...]:
    """Where the step's time goes, as sentences, the largest loss first."""
    step = sum(share.seconds for share in shares)
    losses = sorted((share for share in shares if share.help), key=lambda each: -each.seconds)
    spoken = [loss for loss in losses if loss.seconds >= MIN_REPORTED_SHARE * step][:3]
    return tuple(f"{each.seconds / step:.0%} of the step: {each.what}. To reduce it: {each.help}." for each in spoken)
