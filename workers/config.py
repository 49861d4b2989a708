"""JobSpec: what a user asks for. Pure Python, imports in milliseconds, shared by all three rooms.

`parse_job_spec` is the one door: it returns a checked `JobSpec` or raises `SpecError`, which lists every problem
with the field's path, the rule it breaks and a value that works. Rules across fields live in `workers/spec_rules.py`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

PositiveFloat = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)]
StrictBool = Annotated[bool, Field(strict=True)]

# Far above anything trainable, and small enough for exact arithmetic everywhere: past them is a slip of the hand.
Layers = Annotated[int, Field(gt=0, le=10_000, strict=True)]
Width = Annotated[int, Field(gt=0, le=1_000_000, strict=True)]
Heads = Annotated[int, Field(gt=0, le=100_000, strict=True)]
Length = Annotated[int, Field(gt=0, le=10_000_000, strict=True)]
Vocabulary = Annotated[int, Field(gt=0, le=100_000_000, strict=True)]
AxisSize = Annotated[int, Field(gt=0, le=100_000, strict=True)]
Batch = Annotated[int, Field(gt=0, le=100_000_000, strict=True)]
Steps = Annotated[int, Field(gt=0, le=1_000_000_000, strict=True)]
StepsOrNever = Annotated[int, Field(ge=0, le=1_000_000_000, strict=True)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000, strict=True)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]

BYTE_VOCABULARY = 256


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The transformer's shape. Nothing here depends on the parallel layout."""

    family: Literal["gpt", "llama", "bert"] = "gpt"
    """Model family. Built: gpt."""
    layers: Layers
    """Number of transformer layers (L in the papers)."""
    hidden_size: Width
    """Width of the residual stream, in elements (h)."""
    heads: Heads
    """Number of attention heads (a); divides hidden_size."""
    kv_heads: Heads | None = None
    """Number of key-value heads; default: as many as heads."""
    ffn_hidden_size: Width | None = None
    """Inner width of the MLP, in elements; default: 4 * hidden_size."""
    sequence_length: Length
    """Tokens in one training sequence (s)."""
    vocabulary_size: Vocabulary | None = None
    """Number of token ids (v); default: the tokenizer's. Padded inside to a multiple of parallel.tensor."""
    dropout: Fraction = 0.0
    """Probability of zeroing an activation in training."""
    bias: StrictBool = True
    """Whether linear layers and layer norms carry biases."""
    tie_embeddings: StrictBool = True
    """Whether the output layer shares the token embedding's weight."""

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP, in elements."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """Width of one attention head, in elements."""
        return self.hidden_size // self.heads


class DataConfig(Section):
    """Where tokens come from."""

    source: Literal["python-stdlib", "text", "jsonl", "parquet", "megatron"]
    """Kind of corpus. Built: python-stdlib (the .py files of this Python's standard library) and text."""
    paths: tuple[str, ...] = ()
    """Files and directories of the corpus, in order; a directory stands for its text files, sorted by path."""
    weights: tuple[PositiveFloat, ...] | None = None
    """Sampling weight of each path."""
    tokenizer: str = "bytes"
    """bytes (one token a byte, 256 ids), bpe, or a tokenizer file. Built: bytes."""
    validation_fraction: Fraction = 0.05
    """Last part of the corpus, held out for the validation loss; 0 turns validation off."""


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), warm-up and cosine decay."""

    name: Literal["adamw"] = "adamw"
    """Optimizer."""
    learning_rate: PositiveFloat = 1.0e-3
    """Highest learning rate, reached at the end of the warm-up."""
    min_learning_rate: NonNegativeFloat = 1.0e-4
    """Learning rate of the last step."""
    schedule: Literal["cosine"] = "cosine"
    """Shape of the decay from learning_rate to min_learning_rate."""
    warmup_steps: StepsOrNever = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; norms and biases are never decayed."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    epsilon: PositiveFloat = 1.0e-8
    """Added to the square root of the second moment."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm (L2); larger gradients are scaled down to it. 0 turns clipping off."""


class TrainConfig(Section):
    """How long, how much at once, how fast."""

    steps: Steps
    """Optimizer steps of the whole job."""
    global_batch_size: Batch = 16
    """Sequences in one step, over all data-parallel replicas."""
    micro_batch_size: Batch = 1
    """Sequences that one replica processes at once; a step accumulates over its micro-batches."""
    seed: Seed = 1234
    """Seed of initialisation and sample order."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of compute. Built: fp32."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate."""
    validate_every: StepsOrNever = 0
    """Steps between two validations; 0: never."""
    validation_batches: Steps = 8
    """Global batches of held-out text in one validation, at most the whole held-out part."""
    batch_ramp: dict[str, Any] | None = None
    """Batch-size ramp. Not built."""


class ParallelConfig(Section):
    """The layout: tensor x pipeline x data ranks."""

    tensor: AxisSize = 1
    """Tensor-parallel size (t): ranks that share each layer."""
    pipeline: AxisSize = 1
    """Pipeline-parallel size (p): stages."""
    data: AxisSize = 1
    """Data-parallel size (d): replicas."""
    context: AxisSize = 1
    """Context-parallel size. Built: 1."""
    virtual_stages: Layers = 1
    """Model chunks per stage (v). Built: 1."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    """Order of forwards and backwards in the pipeline. Built: gpipe, 1f1b."""
    sequence_parallel: StrictBool | None = None
    """Split norms and residuals along the sequence over the tensor group (arXiv:2205.05198, section 4.2.2);
    default: exactly when tensor > 1."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in backward; selective: the core attention (arXiv:2205.05198, section 5)."""
    zero: Literal[0, 1, 3] = 1
    """ZeRO stage (arXiv:1910.02054). Built: 1, optimizer state split over the data group."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def sequence_parallel_on(self) -> bool:
        """Whether activations between the tensor-parallel blocks are split along the sequence."""
        if self.sequence_parallel is None:
            return self.tensor > 1
        return self.sequence_parallel and self.tensor > 1


class ElasticConfig(Section):
    """How far the number of replicas may move while the job runs."""

    min_data: AxisSize | None = None
    """Fewest replicas the job may go on with; default: parallel.data."""
    max_data: AxisSize | None = None
    """Most replicas the job may grow to; default: parallel.data."""


class ResourcesConfig(Section):
    """What a rank runs on."""

    accelerator: Literal["auto", "gpu", "cpu"] = "auto"
    """auto: GPUs where the cluster has any, else CPU slots."""


class CheckpointConfig(Section):
    """When state is kept, in memory and on disk."""

    every_steps: StepsOrNever = 50
    """Steps between durable checkpoints; the last step is always saved. 0: no durable checkpoint at all."""
    keep: Steps = 3
    """Newest durable checkpoints kept; older ones are deleted after a newer one is complete."""
    snapshot_every_steps: Steps = 1
    """Steps between snapshots in shared memory; the most that a crash makes a job redo."""


class RecoveryConfig(Section):
    """What failures cost before the job gives up."""

    max_restarts: Count = 20
    """Automatic restarts before the job fails with restarts_exhausted."""


class JobSpec(Section):
    """One training job, as submitted."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")] = "job"
    """A name for people; need not be unique."""
    model: ModelConfig
    """The transformer."""
    data: DataConfig
    """The corpus."""
    train: TrainConfig
    """Steps, batches, optimizer."""
    parallel: ParallelConfig | Literal["auto"] = ParallelConfig()
    """The layout. Built: explicit layouts."""
    elastic: ElasticConfig = ElasticConfig()
    """Bounds for changes of size."""
    resources: ResourcesConfig = ResourcesConfig()
    """Accelerators."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Durable checkpoints and snapshots."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Limits of automatic recovery."""
    priority: Annotated[int, Field(strict=True, ge=-1000, le=1000)] = 0
    """Higher starts first among queued jobs."""

    @property
    def layout(self) -> ParallelConfig:
        """The explicit layout. Raises ValueError while it is still `auto`."""
        if isinstance(self.parallel, str):
            raise ValueError("parallel is still 'auto': plan it first")
        return self.parallel

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one replica runs in a step (m)."""
        return self.train.global_batch_size // (self.layout.data * self.train.micro_batch_size)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, without padding."""
        return self.model.vocabulary_size or BYTE_VOCABULARY


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec."""

    path: str
    """Dotted path of the field, such as `parallel.tensor`."""
    rule: str
    """The rule that is broken, as a sentence."""
    suggestion: str | None = None
    """The nearest value that works."""
    unsupported: bool = False
    """True when the value is valid but its feature is not built."""


class SpecError(ValueError):
    """A spec that cannot be used; `problems` lists every reason."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("; ".join(_sentence(problem) for problem in problems))


def _sentence(problem: Problem) -> str:
    tail = f" (try: {problem.suggestion})" if problem.suggestion else ""
    return f"{problem.path}: {problem.rule}{tail}" if problem.path else f"{problem.rule}{tail}"


def parse_job_spec(document: Any) -> JobSpec:
    """Check `document` (a mapping as read from YAML or JSON) and return the JobSpec.

    Raises SpecError with every problem found: first shapes and types, and once those are right the rules
    across fields.
    """
    from workers.spec_rules import find_problems

    if not isinstance(document, dict):
        raise SpecError([Problem("", f"a job spec is a mapping of sections, not {_kind(document)}", "model: {...}")])
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        raise SpecError(_problems_of(error)) from error
    problems = find_problems(spec)
    if problems:
        raise SpecError(problems)
    return spec


def load_job_spec(path: Path) -> JobSpec:
    """Read and check the YAML file at `path`. Raises SpecError; OSError when it cannot be read."""
    return parse_job_spec(read_document(path))


def read_document(path: Path) -> Any:
    """Parse the YAML file at `path`, with relative data paths resolved against the file's own folder.

    Raises SpecError where it is not YAML, OSError when it cannot be read.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none, not UTF-8
        raise SpecError([Problem("", f"{path} is not valid YAML: {' '.join(str(error).split())}")]) from error
    data = document.get("data") if isinstance(document, dict) else None
    if isinstance(data, dict) and isinstance(data.get("paths"), list):
        base = path.resolve().parent
        data["paths"] = [str(base / entry) if isinstance(entry, str) else entry for entry in data["paths"]]
    return document


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number, as people mean it (YAML 1.1 asks for a dot and a sign)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


_TYPE_NAMES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _problems_of(error: ValidationError) -> list[Problem]:
    """Pydantic's findings in our words, one per field."""
    problems: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        location = [part for part in item["loc"] if part not in ("ParallelConfig", "literal['auto']")]
        path = ".".join(str(part) for part in location)
        if item["type"] == "literal_error" and location == ["parallel"]:
            continue  # the mapping side of the union reports what is wrong
        problems.setdefault(path, _problem_of(path, item))
    return list(problems.values())


def _problem_of(path: str, item: Any) -> Problem:
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    if kind == "extra_forbidden":
        parent, _, key = path.rpartition(".")
        return Problem(path, "unknown key", _closest_key(parent, key))
    if kind == "missing":
        return Problem(path, "required, but missing", _example_of(path))
    if kind in _TYPE_NAMES:
        meant = _working(path, _converted(kind, value))
        return Problem(path, f"must be {_TYPE_NAMES[kind]}, not {_kind(value)}", meant)
    if kind == "literal_error":
        known = [str(entry) for entry in _literals_at(path)]
        closest = difflib.get_close_matches(_shown(value), known, n=1, cutoff=0.0)
        return Problem(path, f"must be one of {', '.join(known)}, not {_shown(value)}", closest[0] if closest else None)
    for name, text in (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most")):
        if name in context:
            bound = context[name]
            nearest = str(bound) if name in ("ge", "le") else "1" if name == "gt" and isinstance(value, int) else None
            return Problem(path, f"must be {text} {bound}, not {_shown(value)}", _working(path, nearest))
    if kind == "finite_number":
        return Problem(path, "must be a finite number", _working(path, None))
    if kind == "string_pattern_mismatch":
        fixed = re.sub(r"[^A-Za-z0-9._ -]", "-", str(value)).lstrip("._ -")[:100]
        return Problem(
            path,
            "must be letters, digits, '.', '_', '-' or spaces, starting with a letter or digit",
            fixed or "job",
        )
    return Problem(path, item["msg"])


def _kind(value: Any) -> str:
    names = {
        dict: "a mapping",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
    }
    if value is None:
        return "nothing"
    shown = f" ({_shown(value)})" if isinstance(value, str | int | float) else ""
    return names.get(type(value), type(value).__name__) + shown


def _shown(value: Any) -> str:
    """`value` as a person wrote it, if that is short."""
    if not isinstance(value, str | int | float):
        return _kind(value)
    try:
        text = repr(value)
    except ValueError:
        return "a huge number"  # Python refuses to write out thousands of digits
    return text if len(text) <= 60 else text[:56] + " ..."


def _working(path: str, suggestion: str | None) -> str | None:
    """`suggestion` if the field at `path` takes it, else the field's default, if it has one."""
    parent, _, key = path.rpartition(".")
    section = _section_at(parent)
    field = section.model_fields.get(key) if section else None
    if field is None:
        return suggestion
    if suggestion is not None:
        try:
            # The field's constraints lie in its metadata.
            whole: Any = Annotated[field.annotation, field]
            TypeAdapter(whole).validate_python(_as_read(suggestion))
        except ValidationError:
            suggestion = None
    if suggestion is None and isinstance(field.default, str | int | float):
        return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
    return suggestion


def _as_read(suggestion: str) -> Any:
    """What YAML makes of a suggestion."""
    try:
        return yaml.load(suggestion, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return suggestion


def _converted(kind: str, value: Any) -> str | None:
    """`value` read as the wanted type, where a person would see what was meant."""
    try:
        if kind in ("int_type", "int_from_float") and not isinstance(value, bool):
            return str(round(float(value)))
        if kind == "float_type" and not isinstance(value, bool):
            return str(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    if kind == "bool_type":
        text = str(value).lower()
        return {"yes": "true", "on": "true", "1": "true", "true": "true"}.get(text, "false")
    if kind == "tuple_type" and isinstance(value, str):
        return f"[{value}]"
    return str(value) if kind == "string_type" and isinstance(value, int | float) else None


def _section_at(path: str) -> type[Section] | None:
    """The section class at a dotted path, or None where there is no section."""
    section: type[Section] = JobSpec
    for part in filter(None, path.split(".")):
        field = section.model_fields.get(part)
        found = (
            next((entry for entry in _alternatives(field.annotation) if _is_section(entry)), None) if field else None
        )
        if found is None:
            return None
        section = found
    return section


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)


def _is_section(entry: Any) -> bool:
    return isinstance(entry, type) and issubclass(entry, Section)


def _literals_at(path: str) -> tuple[Any, ...]:
    parent, _, key = path.rpartition(".")
    section = _section_at(parent)
    if section is None or key not in section.model_fields:
        return ()
    return tuple(
        value
        for entry in _alternatives(section.model_fields[key].annotation)
        if get_origin(entry) is Literal
        for value in get_args(entry)
    )


def _closest_key(parent: str, key: str) -> str | None:
    """The nearest known key: among the section's own, else anywhere in the spec (by its full path)."""
    section = _section_at(parent)
    own = difflib.get_close_matches(key, section.model_fields if section else [], n=1, cutoff=0.6)
    if own:
        return own[0]
    paths = {path.rpartition(".")[2]: path for path in _all_paths(JobSpec, "")}
    elsewhere = difflib.get_close_matches(key, paths, n=1, cutoff=0.75)
    if elsewhere:
        return paths[elsewhere[0]]
    return ", ".join(section.model_fields) if section else None


def _all_paths(section: type[Section], prefix: str) -> list[str]:
    paths: list[str] = []
    for name, field in section.model_fields.items():
        paths.append(prefix + name)
        for entry in _alternatives(field.annotation):
            if _is_section(entry):
                paths += _all_paths(entry, f"{prefix}{name}.")
    return paths


_EXAMPLES = {
    "model": "{layers: 4, hidden_size: 128, heads: 4, sequence_length: 128}",
    "model.layers": "4",
    "model.hidden_size": "128",
    "model.heads": "4",
    "model.sequence_length": "128",
    "data": "{source: python-stdlib, tokenizer: bytes}",
    "data.source": "python-stdlib",
    "train": "{steps: 200}",
    "train.steps": "200",
}


def _example_of(path: str) -> str | None:
    return _EXAMPLES.get(path)
