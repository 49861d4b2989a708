"""Problems of a JobSpec, for users: the field's path, the rule it breaks, and a value that works. Pure Python."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from manta.workers.config import PART_OF_A_NAME, JobSpec, Section
from manta.workers.config.fields import ACCELERATOR_TYPE, ENTRYPOINT, JOB_NAME, LABEL_KEY, LABEL_VALUE
from manta.workers.spec.yaml import read_yaml

UNKNOWN_KEY = "unknown key"
"""The rule that a key breaks which no section has."""


@dataclass(frozen=True)
class Problem:
    """One problem of a spec."""

    path: str
    """Dotted path of the field, such as `parallel.tensor`."""
    rule: str
    """The rule that is broken, as a sentence."""
    suggestion: str | None = None
    """The nearest value that works."""
    unsupported: bool = False
    """True if the value is valid but its feature is not supported yet."""

    @property
    def sentence(self) -> str:
        """The problem as one sentence: path, rule and suggestion."""
        is_list = ", " in (self.suggestion or "")
        wording = " (try: {})" if self.rule != UNKNOWN_KEY else "; known are {}" if is_list else "; did you mean {}?"
        tail = wording.format(self.suggestion) if self.suggestion else ""
        return f"{self.path}: {self.rule}{tail}" if self.path else f"{self.rule}{tail}"


class SpecError(ValueError):
    """A spec that cannot be used; `problems` lists every reason."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("; ".join(problem.sentence for problem in problems))

    def lines(self, file: Path) -> list[str]:
        """One line per problem of the spec in `file`, each starting with the file's name."""
        return [f"{file}: {problem.sentence.removeprefix(f'{file} ')}" for problem in self.problems]


_UNION_MEMBERS = ("ParallelConfig", "constrained-int", "constrained-float", "literal['auto']", "[key]")
"""Components that pydantic adds to the path of a union or of a mapping's key."""

_LETTERS = "must be letters, digits, '.', '_' or '-', the first and the last a letter or digit"
_TEXTS: dict[str, tuple[str, str, str, int, str | None]] = {
    PART_OF_A_NAME: ("must be letters, digits and '_'", r"[^A-Za-z0-9_]", "_", 40, "a"),
    JOB_NAME: (
        "must be letters, digits, '.', '_', '-' or spaces, starting with a letter or digit",
        *(r"[^A-Za-z0-9._ -]", "-", 100, "job"),
    ),
    ACCELERATOR_TYPE: (
        "must be a type as `manta nodes` shows it: letters, digits, '.', '_' or '-'",
        *(r"[^A-Za-z0-9._-]", "-", 64, "A100"),
    ),
    LABEL_KEY: (f"{_LETTERS}, optionally after a domain name and '/'", r"[^A-Za-z0-9._-]", "-", 63, None),
    LABEL_VALUE: (_LETTERS, r"[^A-Za-z0-9._-]", "-", 63, None),
    ENTRYPOINT: ("must be package.module:function", r"(?s).+", "", 0, "my_models.mine:build"),
}
"""By pattern: the rule; a pattern of invalid characters, their replacement in a suggestion, and its maximum length; a
default suggestion."""

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
"""What pydantic calls a bound, and how a number has to lie to it."""

_TYPE_NAMES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "option_type": "a number, a string, true or false",
}


OWN_RULE = "Value error, "
"""What pydantic puts before the sentence of a ValueError."""
_OF_YAML = ": without quotes yes, no, on, off, true and false are booleans in YAML"
"""Why a string is a boolean; which of these words it was is not known any more."""
_UNQUOTED = ": in quotes it stays as it was written"
"""What a number or date is told that is to be a string; its zeros and digits are not known any more."""


UNKNOWN_KEY = "unknown key"
"""The rule that a key which no section has breaks."""
MAX_PROBLEMS = 20
"""Maximum number of problems that are described: a document may have as many as it has keys."""
_MAX_KEY_CHARACTERS = 60


def problems_of(error: ValidationError) -> list[Problem]:
    """Pydantic's errors as problems, at most one per field and MAX_PROBLEMS, followed by how many more there are."""
    problems: dict[str, Problem] = {}
    items = error.errors(include_url=False)
    for number, item in enumerate(items):
        if len(problems) == MAX_PROBLEMS:
            problems[""] = Problem("", f"and {len(items) - number} more problems, once these are fixed")
            break
        location = [part for part in item["loc"] if part not in _UNION_MEMBERS]
        if location[:2] == ["model", "options"] and len(location) > 3:
            location, item = location[:3], {**item, "type": "option_type"}  # a union of types
        path = ".".join(map(_readable, location))
        if item["type"] == "literal_error" and location == ["parallel"]:
            continue  # the mapping member of the union reports the problem
        if item["type"] == "too_short" and any(each.startswith(f"{path}.") for each in problems):
            continue  # without the entries that are wrong
        problems.setdefault(path, _problem_of(path, item))
    return list(problems.values())


def _readable(part: str | int) -> str:
    """A part of a path, which may be a key of any length and with any characters, for a terminal."""
    text = str(part)
    shown = text if text.isprintable() else repr(text)[1:-1]
    return shown if len(shown) <= _MAX_KEY_CHARACTERS else shown[: _MAX_KEY_CHARACTERS - 4] + " ..."


def _problem_of(path: str, item: Any) -> Problem:
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    if kind == "extra_forbidden":
        parent, _, key = path.rpartition(".")
        if why := _LACKING.get(key.lower()):
            return Problem(path, why)
        return Problem(path, UNKNOWN_KEY, _closest_key(parent, key))
    if kind == "missing":
        return Problem(path, "required, but missing", _example_of(path))
    if kind in _TYPE_NAMES:
        meant = _working(path, _converted(kind, value)) or _example_of(path)
        why = "" if kind != "string_type" else _unquoted(value)
        return Problem(path, f"must be {_TYPE_NAMES[kind]}, not {kind_of(value)}{why}", meant)
    if kind == "literal_error":
        known = _literals_at(path)
        rule = f"must be one of {', '.join(map(str, known))}, not {_shown(value)}"
        return Problem(path, rule, _closest_literal(value, known))
    for name, text in _BOUNDS.items():
        if name in context:
            bound = context[name]
            nearest = str(bound) if name in ("ge", "le") else "1" if name == "gt" and isinstance(bound, int) else None
            return Problem(path, f"must be {text} {bound}, not {_shown(value)}", _working(path, nearest))
    if kind == "finite_number":
        return Problem(path, "must be a finite number", _working(path, None))
    if kind == "string_pattern_mismatch" and context["pattern"] in _TEXTS:
        rule, other, instead, most, otherwise = _TEXTS[context["pattern"]]
        return Problem(path, rule, re.sub(other, instead, value).strip("._ -")[:most] or otherwise)
    return Problem(path, describe_rule(item), _example_of(path))


def _unquoted(value: Any) -> str:
    """Why a value that is to be a string is none, if YAML would read it as one with quotes around it."""
    if isinstance(value, bool):
        return _OF_YAML
    return _UNQUOTED if isinstance(value, int | float | date) else ""


def describe_rule(item: Any) -> str:
    """The rule that one of pydantic's errors is about, as a sentence about the value."""
    context = item.get("ctx", {})
    for name, text in _BOUNDS.items():
        if name in context:
            return f"must be {text} {context[name]}"
    if item["type"] == "literal_error":
        return f"must be {context['expected']}"
    for name, text in (("min_length", "at least"), ("max_length", "at most")):
        if item["type"].startswith("string_") and name in context:
            return f"must have {text} {context[name]} character{'' if context[name] == 1 else 's'}"
    if item["type"] == "too_short":
        return f"must have at least {context['min_length']} entr{'y' if context['min_length'] == 1 else 'ies'}"
    if item["type"] == "string_pattern_mismatch" and context["pattern"] in _TEXTS:
        return _TEXTS[context["pattern"]][0]
    if item["type"] in _TYPE_NAMES and "input" in item:
        return f"must be {_TYPE_NAMES[item['type']]}, not {_shown(item['input'])}"
    return str(item["msg"]).removeprefix(OWN_RULE)


def _closest_literal(value: Any, known: tuple[Any, ...]) -> str | None:
    """The member of `known` most similar to `value`; for numbers the nearest, and the smaller of two equally near."""
    numbers = [entry for entry in known if isinstance(entry, int)]
    if numbers and isinstance(value, int | float):
        return str(min(numbers, key=lambda entry: abs(entry - value)))
    closest = difflib.get_close_matches(_shown(value), [str(entry) for entry in known], n=1, cutoff=0.0)
    return closest[0] if closest else None


def kind_of(value: Any) -> str:
    """The type of `value`, in words, with a short value."""
    names = {
        dict: "a mapping",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        date: "a date",
        datetime: "a time",
    }
    if value is None:
        return "nothing"
    shown = f" ({_shown(value)})" if isinstance(value, str | int | float) else ""
    return names.get(type(value), type(value).__name__) + shown


def _shown(value: Any) -> str:
    """`value` as written, shortened to 60 characters."""
    if not isinstance(value, str | int | float):
        return kind_of(value)
    try:
        text = repr(value)
    except ValueError:
        return "a huge number"  # Python refuses to print thousands of digits
    return text if len(text) <= 60 else text[:56] + " ..."


def _working(path: str, suggestion: str | None) -> str | None:
    """`suggestion` if the field at `path` accepts it, otherwise the field's default, if it has one."""
    parent, _, key = path.rpartition(".")
    section = _section_at(parent)
    field = section.model_fields.get(key) if section else None
    if field is None:
        return suggestion
    if suggestion is not None:
        try:
            # The field's constraints are in its metadata.
            whole: Any = Annotated[field.annotation, field]
            TypeAdapter(whole).validate_python(_as_read(suggestion))
        except ValidationError:
            suggestion = None
    if suggestion is None and isinstance(field.default, str | int | float):
        return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
    return suggestion


def _as_read(suggestion: str) -> Any:
    try:
        return read_yaml(suggestion)
    except (yaml.YAMLError, ValueError):
        return suggestion


def _converted(kind: str, value: Any) -> str | None:
    """`value` converted to the required type, if the meaning is obvious."""
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
    if kind == "string_type" and isinstance(value, bool):
        return "'yes'" if value else "'no'"
    return f"'{value}'" if kind == "string_type" and isinstance(value, int) else None


def _section_at(path: str) -> type[Section] | None:
    """The section class at a dotted path, or None if there is no section."""
    section: type[Section] = JobSpec
    for part in path.split("."):
        if not part or part.isdecimal():  # an index into a list of sections
            continue
        field = section.model_fields.get(part)
        inner = next((entry for entry in _sections_in(field.annotation) if _is_section(entry)), None) if field else None
        if inner is None:
            return None
        section = inner
    return section


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)


def _sections_in(annotation: Any) -> tuple[Any, ...]:
    """The possible types of a field, or of the entries of its list."""
    return get_args(annotation) if get_origin(annotation) is tuple else _alternatives(annotation)


def _is_section(entry: Any) -> bool:
    return isinstance(entry, type) and issubclass(entry, Section)


def _literals_at(path: str) -> tuple[Any, ...]:
    parent, _, key = re.sub(r"(\.\d+)+$", "", path).rpartition(".")  # of an entry of a list, those of the list
    section = _section_at(parent)
    if section is None or key not in section.model_fields:
        return ()
    return _literals_in(section.model_fields[key].annotation)


def _literals_in(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    inner = get_args(annotation) if get_origin(annotation) in (tuple, Annotated) else _alternatives(annotation)
    return tuple(value for each in inner if each is not annotation for value in _literals_in(each))


_OTHER_NAMES = {
    **dict.fromkeys(("lr", "peak_lr"), "train.optimizer.learning_rate"),
    **dict.fromkeys(("grad_clip", "max_grad_norm"), "train.optimizer.clip_norm"),
    **dict.fromkeys(("max_steps", "max_iters", "num_steps", "epochs", "num_train_epochs"), "train.steps"),
    **dict.fromkeys(("batch_size", "gradient_accumulation_steps"), "train.global_batch_size"),
    "per_device_train_batch_size": "train.micro_batch_size",
    "warmup_ratio": "train.optimizer.warmup_steps",
    **dict.fromkeys(("dtype", "bf16", "fp16"), "train.precision"),
    "model_name_or_path": "model.from",
    **dict.fromkeys(("max_length", "max_seq_length", "cutoff_len"), "model.sequence_length"),
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers"), "model.layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_attention_heads"), "model.heads"),
    **dict.fromkeys(("d_model", "n_embd", "dim"), "model.hidden_size"),
    **dict.fromkeys(("block_size", "seq_len", "context_length"), "model.sequence_length"),
    **dict.fromkeys(("tp", "tensor_parallel_size"), "parallel.tensor"),
    **dict.fromkeys(("pp", "pipeline_parallel_size"), "parallel.pipeline"),
    **dict.fromkeys(("dp", "data_parallel_size"), "parallel.data"),
    **dict.fromkeys(("ep", "expert_parallel_size", "expert_model_parallel_size"), "parallel.expert"),
    **dict.fromkeys(("moe_token_dispatcher_type", "token_dispatcher"), "parallel.expert_dispatch"),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "model.moe.experts"),
    **dict.fromkeys(("num_experts_per_tok", "moe_router_topk", "top_k"), "model.moe.per_token"),
    **dict.fromkeys(("moe_intermediate_size", "moe_ffn_hidden_size"), "model.moe.ffn_hidden_size"),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), "model.moe.shared"),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        "model.moe.shared_ffn_hidden_size",
    ),
    "first_k_dense_replace": "model.moe.first_dense",
    **dict.fromkeys(("moe_layer_freq", "decoder_sparse_step"), "model.moe.every"),
    **dict.fromkeys(("scoring_func", "moe_router_score_function"), "model.moe.score"),
    **dict.fromkeys(("norm_topk_prob", "normalize"), "model.moe.normalise"),
    **dict.fromkeys(("routed_scaling_factor", "moe_router_topk_scaling_factor"), "model.moe.scale"),
    **dict.fromkeys(("n_group", "moe_router_num_groups"), "model.moe.groups"),
    **dict.fromkeys(("topk_group", "moe_router_group_topk"), "model.moe.groups_per_token"),
    **dict.fromkeys(
        ("router_aux_loss_coef", "moe_aux_loss_coeff", "aux_loss_alpha", "aux_loss_weight"), "model.moe.balance.weight"
    ),
    "moe_router_bias_update_rate": "model.moe.balance.bias_rate",
    **dict.fromkeys(("moe_z_loss_coeff", "router_z_loss_coef"), "model.moe.router_z_loss"),
}
"""Keys by the names that other training programs give them."""
_NO_CAPACITY = (
    f"{UNKNOWN_KEY}: every token goes to all experts chosen for it; which tokens a capacity drops would depend on how "
    "many share a rank, so each layout would train another model"
)
_LACKING = dict.fromkeys(
    (
        *("capacity_factor", "expert_capacity", "expert_capacity_factor", "moe_expert_capacity_factor"),
        *("eval_capacity_factor", "min_capacity", "drop_tokens", "moe_token_drop_policy", "token_drop_policy"),
    ),
    _NO_CAPACITY,
)
"""By the names of keys that other training programs have: why there is none."""


def _closest_key(parent: str, key: str) -> str | None:
    """Full path of the nearest known key: in the section, otherwise anywhere in the spec. If none is near, the keys of
    the section."""
    if meant := _OTHER_NAMES.get(key.lower()):
        return meant
    section = _section_at(parent)
    names = _keys_of(section) if section else []
    own = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if own:
        return f"{parent}.{own[0]}" if parent else own[0]
    elsewhere = difflib.get_close_matches(key, _paths_by_key(), n=1, cutoff=0.75)
    if elsewhere:
        return _paths_by_key()[elsewhere[0]]
    return ", ".join(names) if names else None


@cache
def _paths_by_key() -> dict[str, str]:
    return {path.rpartition(".")[2]: path for path in _all_paths(JobSpec, "")}


def _keys_of(section: type[Section]) -> list[str]:
    """The section's keys as users write them (`from` is reserved in Python and has another name in the class)."""
    return [field.alias or name for name, field in section.model_fields.items()]


def _all_paths(section: type[Section], prefix: str) -> list[str]:
    paths: list[str] = []
    for name, field in zip(_keys_of(section), section.model_fields.values(), strict=True):
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
    "train.batch_ramp": "{start: 4, increment: 4, samples: 1000}",
    "elastic": "{min_data: 1, max_data: 2}",
    "labels": "{team: research}",
    "max_duration": "3600",
    "name": "my-model",
}


def _example_of(path: str) -> str | None:
    return _EXAMPLES.get(path)
