"""Rules across the fields of a JobSpec: what is not built yet, and what does not fit together.

Each rule is a function of the spec that yields problems; each problem names the nearest value that works.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

from workers.config import BYTE_VOCABULARY, JobSpec
from workers.spec_problems import Problem

Rule = Callable[[JobSpec], Iterator[Problem]]


def find_problems(spec: JobSpec) -> list[Problem]:
    """All broken rules. Unsupported values come first, since a layout cannot be judged before it is known."""
    problems = [problem for rule in UNSUPPORTED for problem in rule(spec)]
    if not isinstance(spec.parallel, str):
        problems += [problem for rule in FITTING for problem in rule(spec)]
    return problems


def nearest_divisor(of: int, to: int) -> int:
    """The divisor of `of` that lies nearest to `to` (the smaller one when two are as near)."""
    return min(_divisors(of), key=lambda d: (abs(d - to), d))


def _divisors(of: int) -> list[int]:
    """All divisors of `of`."""
    small = [d for d in range(1, math.isqrt(of) + 1) if of % d == 0]
    return small + [of // d for d in small]


def nearest_multiple(of: int, to: int) -> int:
    """The positive multiple of `of` that lies nearest to `to` (the smaller one when two are as near)."""
    below = to // of * of
    return max(of, below if to - below <= of // 2 else below + of)


def _not_built(path: str, value: object, *works: str) -> Problem:
    return Problem(path, f"{value} is not supported yet; what works: {' or '.join(works)}", works[0], unsupported=True)


def _unsupported_model(spec: JobSpec) -> Iterator[Problem]:
    model = spec.model
    if model.family != "gpt":
        yield _not_built("model.family", model.family, "gpt")
    if model.kv_heads not in (None, model.heads):
        yield _not_built("model.kv_heads", model.kv_heads, f"{model.heads}")
    if model.dropout > 0:
        yield _not_built("model.dropout", model.dropout, "0.0")


def _unsupported_data(spec: JobSpec) -> Iterator[Problem]:
    data = spec.data
    if data.source not in ("python-stdlib", "text"):
        yield _not_built("data.source", data.source, "text", "python-stdlib")
    if data.tokenizer != "bytes":
        yield _not_built("data.tokenizer", data.tokenizer, "bytes")
    if data.weights is not None:
        yield Problem("data.weights", "weights are not supported yet; leave the key out", None, unsupported=True)


def _unsupported_train(spec: JobSpec) -> Iterator[Problem]:
    if spec.train.precision != "fp32":
        yield _not_built("train.precision", spec.train.precision, "fp32")
    if spec.train.batch_ramp is not None:
        yield Problem(
            "train.batch_ramp", "a batch ramp is not supported yet; leave the key out", None, unsupported=True
        )


def _unsupported_parallel(spec: JobSpec) -> Iterator[Problem]:
    layout = spec.parallel
    if isinstance(layout, str):
        yield _not_built("parallel", layout, "{tensor: 1, pipeline: 1, data: 1}")
        return
    if layout.context != 1:
        yield _not_built("parallel.context", layout.context, "1")
    if layout.virtual_stages != 1:
        yield _not_built("parallel.virtual_stages", layout.virtual_stages, "1")
    if layout.schedule not in ("gpipe", "1f1b"):
        yield _not_built("parallel.schedule", layout.schedule, "1f1b", "gpipe")
    if layout.recompute == "full":
        yield _not_built("parallel.recompute", layout.recompute, "selective", "none")
    if layout.zero != 1:
        yield _not_built("parallel.zero", layout.zero, "1")


def _heads_divide_hidden(spec: JobSpec) -> Iterator[Problem]:
    hidden, heads, tensor = spec.model.hidden_size, spec.model.heads, spec.layout.tensor
    if hidden % heads:
        # One that fits the layout too, where there is one.
        unit = tensor if hidden % tensor == 0 else 1
        nearest = unit * nearest_divisor(hidden // unit, round(heads / unit))
        yield Problem("model.heads", f"heads ({heads}) must divide hidden_size ({hidden})", str(nearest))


def _tensor_divides(spec: JobSpec) -> Iterator[Problem]:
    tensor, model = spec.layout.tensor, spec.model
    if model.hidden_size % model.heads:
        return  # the heads are wrong first
    if model.heads % tensor:
        # One that divides all that is split, so that following the advice is enough.
        split = math.gcd(model.heads, model.ffn_size)
        if spec.layout.sequence_parallel is not False:
            split = math.gcd(split, model.sequence_length)
        yield Problem(
            "parallel.tensor",
            f"tensor ({tensor}) must divide model.heads ({model.heads})",
            str(nearest_divisor(split, tensor)),
        )
    elif model.ffn_size % tensor:
        yield Problem(
            "model.ffn_hidden_size",
            f"ffn_hidden_size ({model.ffn_size}) must be a multiple of parallel.tensor ({tensor})",
            str(nearest_multiple(tensor, model.ffn_size)),
        )


def _sequence_parallel_fits(spec: JobSpec) -> Iterator[Problem]:
    tensor, length = spec.layout.tensor, spec.model.sequence_length
    if spec.layout.sequence_parallel and tensor == 1:
        yield Problem(
            "parallel.sequence_parallel",
            "sequence parallelism splits over the tensor group, but parallel.tensor is 1",
            "false",
        )
    if spec.layout.sequence_parallel_on and length % tensor and spec.model.heads % tensor == 0:
        yield Problem(
            "model.sequence_length",
            f"sequence_length ({length}) must be a multiple of parallel.tensor ({tensor}) with sequence parallelism",
            str(nearest_multiple(tensor, length)),
        )


def _pipeline_divides(spec: JobSpec) -> Iterator[Problem]:
    stages, layers = spec.layout.pipeline, spec.model.layers
    if layers % stages:
        yield Problem(
            "parallel.pipeline",
            f"pipeline ({stages}) must divide model.layers ({layers})",
            str(nearest_divisor(layers, stages)),
        )


def _batch_divides(spec: JobSpec) -> Iterator[Problem]:
    train, data = spec.train, spec.layout.data
    unit = data * train.micro_batch_size
    if train.global_batch_size % unit:
        yield Problem(
            "train.global_batch_size",
            f"global_batch_size ({train.global_batch_size}) must be a multiple of parallel.data x micro_batch_size "
            f"({data} x {train.micro_batch_size})",
            str(nearest_multiple(unit, train.global_batch_size)),
        )


def _vocabulary_holds_tokenizer(spec: JobSpec) -> Iterator[Problem]:
    if spec.vocabulary_size < BYTE_VOCABULARY:
        yield Problem(
            "model.vocabulary_size",
            f"vocabulary_size ({spec.vocabulary_size}) is smaller than the bytes tokenizer's ({BYTE_VOCABULARY})",
            str(BYTE_VOCABULARY),
        )


def _paths_match_source(spec: JobSpec) -> Iterator[Problem]:
    data = spec.data
    if data.source == "python-stdlib" and data.paths:
        yield Problem("data.paths", "source python-stdlib takes no paths (source text does)", "[]")
    if data.source == "text" and not data.paths:
        yield Problem("data.paths", "source text needs at least one file or directory", "[corpus.txt]")
    if any("\0" in path for path in data.paths):
        kept = [path.replace("\0", "") for path in data.paths]
        yield Problem("data.paths", "a path cannot contain a zero byte", json.dumps(kept))


def _learning_rates_ordered(spec: JobSpec) -> Iterator[Problem]:
    optimizer = spec.train.optimizer
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield Problem(
            "train.optimizer.min_learning_rate",
            f"min_learning_rate ({optimizer.min_learning_rate}) must be at most learning_rate "
            f"({optimizer.learning_rate})",
            str(optimizer.learning_rate),
        )
    if optimizer.warmup_steps > spec.train.steps:
        yield Problem(
            "train.optimizer.warmup_steps",
            f"warmup_steps ({optimizer.warmup_steps}) must be at most train.steps ({spec.train.steps})",
            str(spec.train.steps),
        )


def _validation_has_data(spec: JobSpec) -> Iterator[Problem]:
    if spec.train.validate_every and not spec.data.validation_fraction:
        yield Problem("train.validate_every", "validation needs data.validation_fraction above 0", "0")


def _elastic_bounds_hold(spec: JobSpec) -> Iterator[Problem]:
    data = spec.layout.data
    if (spec.elastic.min_data or data) > data:
        yield Problem("elastic.min_data", f"must be at most parallel.data ({data})", str(data))
    if (spec.elastic.max_data or data) < data:
        yield Problem("elastic.max_data", f"must be at least parallel.data ({data})", str(data))


UNSUPPORTED: tuple[Rule, ...] = (
    _unsupported_model,
    _unsupported_data,
    _unsupported_train,
    _unsupported_parallel,
)
FITTING: tuple[Rule, ...] = (
    _heads_divide_hidden,
    _tensor_divides,
    _sequence_parallel_fits,
    _pipeline_divides,
    _batch_divides,
    _vocabulary_holds_tokenizer,
    _paths_match_source,
    _learning_rates_ordered,
    _validation_has_data,
    _elastic_bounds_hold,
)
