"""Rules about batches: their division among replicas and micro-batches, and ramps."""

from __future__ import annotations

from collections.abc import Iterator

from manta.workers.config import JobSpec
from manta.workers.spec.divisors import divisors, nearest_divisor, nearest_multiple
from manta.workers.spec.problems import Problem

# Far more increments than needed; each is kept in memory.
MAX_INCREMENTS = 10_000


def smallest_batch(spec: JobSpec) -> tuple[str, int]:
    """The path of the field that sets the smallest global batch of the job, and that batch size."""
    train = spec.train
    if train.batch_ramp is not None and train.batch_ramp.start < train.global_batch_size:
        return "train.batch_ramp.start", train.batch_ramp.start
    return "train.global_batch_size", train.global_batch_size


def _every_replica_has_samples(spec: JobSpec) -> Iterator[Problem]:
    data, (path, smallest) = spec.layout.data, smallest_batch(spec)
    if smallest < data:
        yield Problem(
            path, f"a batch of {smallest} has no samples for some of parallel.data ({data}) replicas", str(data)
        )


def _every_replica_has_whole_micro_batches(spec: JobSpec) -> Iterator[Problem]:
    layout, size, (path, smallest) = spec.layout, spec.train.micro_batch_size, smallest_batch(spec)
    if spec.train.deterministic != "elastic" or smallest < layout.data:
        return
    unit, what = layout.micro_batch_unit * size, "micro-batches"
    if unit > size:
        what = f"groups of {layout.micro_batch_unit} micro-batches (interleaving takes one per stage at a time)"
    most, rule = -(-smallest // unit), f"with train.deterministic elastic, {what} are not split between replicas"
    if most < layout.data:
        problem = f"a batch of {smallest} has only {most} for parallel.data ({layout.data}): {rule}"
        yield Problem(path, problem, str(unit * layout.data))
    elif (spec.elastic.max_data or 1) > most:
        problem = f"{spec.elastic.max_data} is more than the {most} of the smallest batch ({path}): {rule}"
        yield Problem("elastic.max_data", problem, str(most))


def _ramp_reaches_the_batch(spec: JobSpec) -> Iterator[Problem]:
    ramp, batch = spec.train.batch_ramp, spec.train.global_batch_size
    if ramp is None:
        return
    if ramp.start > batch:
        yield Problem(
            "train.batch_ramp.start",
            f"the ramp starts at {ramp.start}, above global_batch_size ({batch})",
            str(batch),
        )
    elif (batch - ramp.start) // ramp.increment > MAX_INCREMENTS:
        unit = _interleaving_unit(spec)
        least = -(-(batch - ramp.start) // (MAX_INCREMENTS * unit))
        fitting = min(d for d in divisors((batch - ramp.start) // unit) if d >= least)
        yield Problem(
            "train.batch_ramp.increment",
            f"an increment of {ramp.increment} needs more than {MAX_INCREMENTS} increments",
            str(fitting * unit),
        )
    elif (batch - ramp.start) % ramp.increment:
        yield Problem(
            "train.batch_ramp.increment",
            f"increments of {ramp.increment} from {ramp.start} do not reach global_batch_size ({batch}) exactly",
            str(_nearest_increment(spec)),
        )


def _interleaving_unit(spec: JobSpec) -> int:
    """Batches must be multiples of this: interleaving takes one micro-batch per stage at a time."""
    layout = spec.layout
    if layout.micro_batch_unit == 1:
        return 1
    # With elastic sums replicas may have different numbers of micro-batches.
    replicas = layout.data if spec.train.deterministic == "layout" else 1
    return replicas * layout.pipeline * spec.train.micro_batch_size


def _describe_unit(spec: JobSpec) -> str:
    layout, size = spec.layout, spec.train.micro_batch_size
    if spec.train.deterministic == "elastic":
        return f"pipeline x micro_batch_size ({layout.pipeline} x {size})"
    return f"data x pipeline x micro_batch_size ({layout.data} x {layout.pipeline} x {size})"


def _nearest_increment(spec: JobSpec) -> int:
    """The increment nearest to the ramp's that reaches the full batch and whose batches fit the schedule."""
    ramp, unit = spec.train.batch_ramp, _interleaving_unit(spec)
    assert ramp is not None
    distance = (spec.train.global_batch_size - ramp.start) // unit
    if distance == 0:
        return nearest_multiple(unit, ramp.increment)
    return unit * nearest_divisor(distance, max(1, round(ramp.increment / unit)))


def _interleaving_fits_batches(spec: JobSpec) -> Iterator[Problem]:
    train, unit = spec.train, _interleaving_unit(spec)
    sizes = {"train.global_batch_size": (train.global_batch_size, nearest_multiple(unit, train.global_batch_size))}
    if train.batch_ramp is not None:
        ramp = train.batch_ramp
        sizes["train.batch_ramp.start"] = (ramp.start, nearest_multiple(unit, ramp.start))
        if ramp.start <= train.global_batch_size:
            sizes["train.batch_ramp.increment"] = (ramp.increment, _nearest_increment(spec))
    for path, (size, nearest) in sizes.items():
        if size % unit:
            yield Problem(
                path,
                f"{size} must be a multiple of {_describe_unit(spec)}: interleaving takes one micro-batch per stage "
                "at a time",
                str(nearest),
            )


def elastic_bounds_hold(spec: JobSpec) -> Iterator[Problem]:
    """The bounds of `elastic` include the present number of replicas, and batches suit every number within them."""
    data = spec.layout.data
    if (spec.elastic.min_data or data) > data:
        yield Problem("elastic.min_data", f"must be at most parallel.data ({data})", str(data))
    if (spec.elastic.max_data or data) < data:
        yield Problem("elastic.max_data", f"must be at least parallel.data ({data})", str(data))
    for size in _sizes_that_may_not_fit(spec):
        larger = spec.model_copy(update={"parallel": spec.layout.model_copy(update={"data": size})})
        broken = [
            problem for rule in (_every_replica_has_samples, _interleaving_fits_batches) for problem in rule(larger)
        ]
        if broken:
            yield Problem("elastic.max_data", f"{size} replicas do not work: {broken[0].rule}", str(size - 1))
            return


def _sizes_that_may_not_fit(spec: JobSpec) -> range:
    """Numbers of replicas above `parallel.data` that must be checked to find the first one that breaks a rule. If
    batches must be multiples of the number, all are checked, of which an early one breaks a rule; otherwise only those
    above the smallest batch can."""
    first, last = spec.layout.data + 1, spec.elastic.max_data or spec.layout.data
    if spec.train.deterministic == "layout" and _interleaving_unit(spec) > 1:
        return range(first, last + 1)
    return range(max(first, min(last, smallest_batch(spec)[1] + 1)), last + 1)


BATCH_RULES = (
    _every_replica_has_samples,
    _every_replica_has_whole_micro_batches,
    _interleaving_fits_batches,
    _ramp_reaches_the_batch,
)
