"""config.json <-> the section `model` of a JobSpec. What is written can be read by both transformers 4 and 5. Pure
Python.

A missing key has the default of the class of transformers (`LlamaConfig` and so on), since config.json leaves out what
equals the default. What none of our families computes is an error that names the key: no other model is trained than
the one whose weights these are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manta.workers.config import JobSpec, ModelConfig, MoeConfig, RopeConfig
from manta.workers.data.read_errors import weights_error
from manta.workers.errors import WeightsError
from manta.workers.system.regular_files import MAX_SETTINGS_BYTES, read_regular

Section = dict[str, Any]

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"


class Keys:
    """An object of a JSON file whose values are checked when they are used."""

    def __init__(self, values: dict[str, Any], where: str):
        """`where`: the file, and the object within it, for messages."""
        self.values, self.where = values, where

    def wrong(self, key: str, rule: str) -> WeightsError:
        """The error for `key`."""
        return WeightsError(f"{self.where}: {key} is {json.dumps(self.values.get(key))}: {rule}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value; null counts as missing."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises WeightsError, also if it is missing and has no default."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "must be a whole number of at least 1")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number of at least 0. Raises WeightsError."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, "must be a whole number of at least 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0. Raises WeightsError."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, "must be a number above 0")
        return float(value)

    def _required(self, key: str, default: float | None) -> Any:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise WeightsError(f"{self.where}: {key} is missing")
        return default if value is None and default is not None else value

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises WeightsError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def inner(self, key: str) -> Keys | None:
        """The object at `key`; None if there is none. Raises WeightsError if it is not an object."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "must be an object")
        return Keys(value, f"{self.where}: {key}")


def read_config(folder: Path) -> Keys:
    """config.json of `folder`. Raises WeightsError."""
    path = folder / CONFIG
    try:
        if not folder.is_dir():
            raise WeightsError(f"there is no folder {folder}; if it should be there, is it mounted here?")
        return json_object(path)
    except FileNotFoundError:
        raise WeightsError(f"{folder} has no {CONFIG}: {_what_to_name(folder)}") from None
    except OSError as error:
        raise weights_error(path, error) from error


def json_object(path: Path) -> Keys:
    """The object in a file of JSON. Raises OSError, and WeightsError if there is none in it."""
    content = read_regular(path, MAX_SETTINGS_BYTES)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return Keys(values, str(path))


def _what_to_name(folder: Path) -> str:
    """What to do about a folder without a config.json."""
    if (folder / CONFIG).is_symlink():
        return f"it is a link to {(folder / CONFIG).readlink()}, which is not there; a hub's cache needs its blobs too"
    if (folder / ADAPTER_CONFIG).exists():
        return "it holds an adapter; merge that into the weights that it was made for, and name the result"
    if (folder / "params.json").exists():
        return "it holds weights in the format of those who made them (params.json); take those for transformers"
    with suppress(OSError):
        below = [*folder.glob(f"*/{CONFIG}"), *folder.glob(f"snapshots/*/{CONFIG}")]
        if below:
            return f"there is one in {min(below).parent}"
    return "name a folder as transformers' save_pretrained writes it"


@dataclass(frozen=True)
class Shape:
    """What a config.json says about a model."""

    section: Section
    """Keys of `model`, except sequence_length."""
    huggingface_names: dict[str, str]
    """Names in config.json, by key of `model`."""
    positions: int
    """Tokens in the longest sequence that the model is meant for."""
    positions_name: str
    """Name of `positions` in config.json."""


def shape_of(config: Keys) -> Shape:
    """The model that `config` describes. Raises WeightsError."""
    kind = config.get("model_type")
    if kind not in READERS:
        is_qwen2 = kind in ("qwen2", "qwen2_moe")
        others = " (Qwen 2 has biases on queries, keys and values only)" if is_qwen2 else ""
        raise config.wrong("model_type", f"supported: {', '.join(READERS)}{others}")
    for key, why in _NEVER.items():
        if config.get(key):
            raise WeightsError(f"{config.where}: {key}: {why}")
    for key in _OF_CHOICE:
        if key in config.values and config.values[key] is None:
            raise config.wrong(key, "null has no meaning here: give its value")
    if config.get("auto_map") and config.get("architectures") != [_CLASSES[kind]]:
        why = f"the model needs code from its folder, which Manta never runs; it knows {_CLASSES[kind]} itself"
        raise WeightsError(f"{config.where}: auto_map: {why}, which architectures does not name")
    return READERS[kind](config)


_OF_CHOICE = (
    "num_experts_per_tok", "first_k_dense_replace", "n_shared_experts", "norm_topk_prob", "routed_scaling_factor",
    "n_group", "topk_group",
)  # fmt: skip
"""Keys whose null is not their default: it means something else, or nothing, in other code for these weights."""
_DROPS = "every token goes to all experts chosen for it; there is no capacity, and none is dropped"
_NEVER = {
    "quantization_config": "quantized weights cannot be trained; use the original weights, or convert these to bf16 "
    "(those of DeepSeek V3 with fp8_cast_bf16.py of its repository), and remove this key",
    "vision_config": "image inputs are not supported",
    "text_config": "models with several parts are not supported; use the folder of the text model alone",
    "capacity_factor": _DROPS,
    "expert_capacity": _DROPS,
    "moe_capacity_factor": _DROPS,
    "moe_expert_capacity_factor": _DROPS,
    "router_jitter_noise": "noise on what the router reads is not supported; set it to 0",
}


def _gpt2(config: Keys) -> Shape:
    names = {
        "layers": "n_layer", "hidden_size": "n_embd", "heads": "n_head", "ffn_hidden_size": "n_inner",
        "vocabulary_size": "vocab_size", "tie_embeddings": "tie_word_embeddings", "norm_epsilon": "layer_norm_epsilon",
        "activation": "activation_function", "family": "model_type",
    }  # fmt: skip
    hidden = config.integer("n_embd", 768)
    activation = config.get("activation_function", "gelu_new")
    if activation not in _GELUS:
        raise config.wrong("activation_function", f"supported: {', '.join(_GELUS)}")
    for key, needed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.flag(key, needed) is not needed:
            raise config.wrong(key, f"only {str(needed).lower()} is supported")
    section = {
        "family": "gpt",
        "layers": config.integer("n_layer", 12),
        "hidden_size": hidden,
        "heads": config.integer("n_head", 12),
        "ffn_hidden_size": config.integer("n_inner", 4 * hidden),
        "vocabulary_size": config.integer("vocab_size", 50257),
        "bias": True,
        "tie_embeddings": config.flag("tie_word_embeddings", default=True),
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "activation": _GELUS[activation],
    }
    return Shape(section, names, config.integer("n_positions", 1024), "n_positions")


_GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class _Defaults:
    kv_heads: int | None
    """None: the number of heads."""
    head_dim: int | None
    """None: hidden_size / heads."""
    positions: int
    theta: float = 10_000.0
    norm_epsilon: float = 1e-6


_DEFAULTS = {
    "llama": _Defaults(None, None, 2048),
    "mistral": _Defaults(8, None, 131072),
    "mixtral": _Defaults(8, None, 131072, 1e6, 1e-5),
    "qwen3": _Defaults(32, 128, 32768),
    "qwen3_moe": _Defaults(4, None, 32768),
    "deepseek_v3": _Defaults(None, None, 4096),
}


def _llama_like(config: Keys) -> Shape:
    kind = config.values["model_type"]
    defaults = _DEFAULTS[kind]
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise config.wrong("hidden_act", "only silu is supported")
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    says_all_heads = config.values.get("num_key_value_heads", 0) is None  # null, which differs from a missing key
    section = {
        "family": "qwen" if kind.startswith("qwen3") else "llama",
        "layers": config.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": heads if says_all_heads else config.integer("num_key_value_heads", defaults.kv_heads or heads),
        "head_dim": config.integer("head_dim", defaults.head_dim or max(1, hidden // heads)),
        "ffn_hidden_size": config.integer("intermediate_size"),
        "vocabulary_size": config.integer("vocab_size"),
        "bias": _bias(config),
        "tie_embeddings": config.flag("tie_word_embeddings", default=False),
        "norm_epsilon": config.number("rms_norm_eps", defaults.norm_epsilon),
        "rope": _rope(config, defaults),
        **_windows(config, kind),
    }
    if kind == "mixtral":
        section["moe"] = {
            "experts": _experts(config, 8),
            "per_token": config.integer("num_experts_per_tok", 2),
            "ffn_hidden_size": section["ffn_hidden_size"],
        }
    elif kind == "qwen3_moe":
        section["moe"] = _qwen_experts(config)
    return _shape(config, section, defaults)


def _shape(config: Keys, section: Section, defaults: _Defaults) -> Shape:
    moe = section.get("moe") or {}
    if moe.get("per_token") == 1 and moe.get("normalise", True):
        why = "divided by itself, the weight of a token's only expert is always 1, so the router would not learn"
        raise config.wrong("num_experts_per_tok", f"must be at least 2: {why}")
    positions = config.integer("max_position_embeddings", defaults.positions)
    return Shape(section, _NAMES, positions, "max_position_embeddings")


def _experts(config: Keys, default: int, *names: str) -> int:
    """The number of experts, which releases of transformers name differently."""
    known = (*names, "num_experts", "num_local_experts")
    return config.integer(next((name for name in known if config.get(name) is not None), known[0]), default)


def _qwen_experts(config: Keys) -> Section | None:
    layers, every = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise config.wrong("mlp_only_layers", "must be a list of numbers of layers")
    sparse = [layer for layer in range(layers) if layer not in dense and (layer + 1) % every == 0]
    if not sparse:
        return None
    first = max((layer + 1 for layer in dense if layer < sparse[0]), default=0)
    if sparse != [layer for layer in range(first, layers) if (layer + 1) % every == 0]:
        raise config.wrong("mlp_only_layers", "only the first layers may have no experts, and of the others every n-th")
    return {
        "experts": _experts(config, 128),
        "per_token": config.integer("num_experts_per_tok", 8),
        "ffn_hidden_size": config.integer("moe_intermediate_size", 768),
        "first_dense": first,
        "every": every,
        "normalise": config.flag("norm_topk_prob", default=False),
    }


def _deepseek(config: Keys) -> Shape:
    defaults, heads = _DEFAULTS["deepseek_v3"], config.integer("num_attention_heads", 128)
    for key, needed in _OF_DEEPSEEK.items():
        if config.get(key, needed) != needed:
            raise config.wrong(key, f"only {json.dumps(needed)} is supported")
    if config.integer("num_key_value_heads", heads) != heads:
        raise config.wrong("num_key_value_heads", f"must be num_attention_heads, {heads}")
    is_plain = "q_lora_rank" in config.values and config.values["q_lora_rank"] is None
    layers, dense = config.integer("num_hidden_layers", 61), config.count("first_k_dense_replace", 3)
    section: Section = {
        "family": "deepseek",
        "layers": layers,
        "hidden_size": config.integer("hidden_size", 7168),
        "heads": heads,
        "ffn_hidden_size": config.integer("intermediate_size", 18432),
        "vocabulary_size": config.integer("vocab_size", 129280),
        "bias": False,
        "tie_embeddings": config.flag("tie_word_embeddings", default=False),
        "norm_epsilon": config.number("rms_norm_eps", defaults.norm_epsilon),
        "rope": _rope(config, defaults),
        "latent_attention": {
            "q_rank": None if is_plain else config.integer("q_lora_rank", 1536),
            "kv_rank": config.integer("kv_lora_rank", 512),
            "rope_size": config.integer("qk_rope_head_dim", 64),
            "nope_size": config.integer("qk_nope_head_dim", 128),
            "value_size": config.integer("v_head_dim", 128),
        },
    }
    if dense < layers:
        section["moe"] = {
            "experts": _experts(config, 256, "n_routed_experts"),
            "per_token": config.integer("num_experts_per_tok", 8),
            "ffn_hidden_size": config.integer("moe_intermediate_size", 2048),
            "first_dense": dense,
            "shared": config.integer("n_shared_experts", 1),
            "score": "sigmoid",
            "normalise": config.flag("norm_topk_prob", default=True),
            "scale": config.number("routed_scaling_factor", 2.5),
            "groups": config.integer("n_group", 8),
            "groups_per_token": config.integer("topk_group", 4),
        }
    return _shape(config, section, defaults)


_OF_DEEPSEEK: Section = {
    "hidden_act": "silu", "attention_bias": False, "rope_interleave": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_layer_freq": 1,
}  # fmt: skip
"""Keys that have only one supported value."""


_NAMES = {
    "layers": "num_hidden_layers", "hidden_size": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn_hidden_size": "intermediate_size",
    "vocabulary_size": "vocab_size", "bias": "attention_bias", "tie_embeddings": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps", "rope": "rope_scaling", "sliding_window": "sliding_window",
    "full_attention_every": "layer_types", "family": "model_type", "moe": "the keys of experts",
    "latent_attention": "the keys of its attention",
}  # fmt: skip

READERS: dict[str, Callable[[Keys], Shape]] = {
    "gpt2": _gpt2,
    "llama": _llama_like,
    "mistral": _llama_like,
    "mixtral": _llama_like,
    "qwen3": _llama_like,
    "qwen3_moe": _llama_like,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}
"""By `model_type`. Kimi K2 is a DeepSeek V3 of another size (arXiv:2507.20534, table 2)."""


def _bias(config: Keys) -> bool:
    attention = config.flag("attention_bias", default=False)
    mlp = config.flag("mlp_bias", default=False)
    if attention and config.values["model_type"] != "llama":
        raise config.wrong("attention_bias", "biases in attention only are not supported")
    if attention != mlp:
        raise config.wrong(
            "attention_bias", f"model.bias applies to all linear layers, but mlp_bias is {str(mlp).lower()}"
        )
    return attention


def _windows(config: Keys, kind: str) -> Section:
    """`sliding_window` and `full_attention_every`."""
    none: Section = {"sliding_window": None, "full_attention_every": None}
    is_qwen = kind.startswith("qwen3")
    has_windows = kind == "mistral" or (is_qwen and config.flag("use_sliding_window", default=False))
    has_windows |= kind == "mixtral" and config.get("sliding_window") is not None
    if not has_windows or ("sliding_window" in config.values and config.values["sliding_window"] is None):
        return none
    window = config.integer("sliding_window", 4096)
    if kind == "mistral" and config.get("layer_types") is not None and "full_attention" in _layer_types(config):
        raise WeightsError(f"{config.where}: layer_types: with mistral only windows in all layers are supported")
    if kind != "qwen3":
        return none | {"sliding_window": window}
    sliding = [entry == "sliding_attention" for entry in _layer_types(config)]
    if not any(sliding):
        return none
    if all(sliding):
        return none | {"sliding_window": window}
    every = sliding.index(False) + 1
    if any((number % every != 0) != here for number, here in enumerate(sliding, start=1)):
        key = "layer_types" if config.get("layer_types") is not None else "max_window_layers"
        raise WeightsError(
            f"{config.where}: {key}: the only supported pattern is windows in all layers except every n-th"
        )
    return {"sliding_window": window, "full_attention_every": every}


def _layer_types(config: Keys) -> list[str]:
    """What the layers attend to; if the list is missing, the first layers attend to everything."""
    layers = config.integer("num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        return ["full_attention" if n < first else "sliding_attention" for n in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise WeightsError(f"{config.where}: layer_types must be a list with one entry for each of {layers} layers")
    unknown = next((entry for entry in types if entry not in ("full_attention", "sliding_attention")), None)
    if unknown is not None:
        known = "the types are full_attention and sliding_attention"
        raise WeightsError(f"{config.where}: layer_types has {unknown!r}: {known}")
    return types


def _rope(config: Keys, defaults: _Defaults) -> Section:
    """`rope`, in the form of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    inner = config.inner(key) or Keys({}, config.where)
    other = config.inner("rope_parameters") or inner
    for name in sorted(inner.values.keys() & other.values.keys()):
        if inner.values[name] != other.values[name]:
            raise config.wrong(key, f"rope_parameters has another {name}, {json.dumps(other.values[name])}")
    inner = Keys(other.values | inner.values, inner.where)
    for name, same in (("type", inner), (_ORIGINAL, config)):  # older names and places
        new = "rope_type" if name == "type" else name
        if inner.get(new) is not None and same.get(name, inner.get(new)) != inner.get(new):
            raise same.wrong(name, f"{key} has another {new}, {json.dumps(inner.values[new])}")
    if inner.get(_ORIGINAL) is None and config.get(_ORIGINAL) is not None:
        inner.values[_ORIGINAL] = config.values[_ORIGINAL]
    if config.get("partial_rotary_factor", 1.0) != 1.0 or inner.get("partial_rotary_factor", 1.0) != 1.0:
        raise WeightsError(f"{config.where}: partial_rotary_factor: only 1.0 (rotation of whole heads) is supported")
    if any(isinstance(value, dict) for value in inner.values.values()):
        raise WeightsError(f"{config.where}: {key}: only the same rotary settings in all layers are supported")
    theta = inner.number("rope_theta", config.number("rope_theta", defaults.theta))
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind != "default" and kind not in _SCALINGS:
        name = "rope_type" if "rope_type" in inner.values else "type"
        raise inner.wrong(name, f"supported: default, {', '.join(_SCALINGS)}")
    unknown = inner.values.keys() - _ROPE_KEYS
    if unknown:
        raise WeightsError(
            f"{inner.where}: {', '.join(sorted(unknown))}: not known, so what it changes is not computed"
        )
    if kind == "default":
        return {"theta": theta, "scaling": None}
    factor = inner.number("factor")
    if factor < 1:
        raise inner.wrong("factor", "must be at least 1")
    length = config.integer("max_position_embeddings", defaults.positions)
    scaling = {"type": kind, "factor": factor, **_SCALINGS[kind](inner, length)}
    of_deepseek = READERS[config.values["model_type"]] is _deepseek
    if kind == "yarn":
        scaling |= _scales(inner, factor, of_deepseek)
    elif of_deepseek and inner.get("mscale_all_dim"):
        raise inner.wrong("mscale_all_dim", "only supported with yarn")
    return {"theta": theta, "scaling": scaling}


_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "truncate", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
    "attention_factor", "max_position_embeddings", "finetuned",
}  # fmt: skip
"""Keys that are read, or are known to change nothing."""


def _llama3(inner: Keys, positions: int) -> Section:
    return {
        "original_length": inner.integer("original_max_position_embeddings"),
        "low_frequency_factor": inner.number("low_freq_factor"),
        "high_frequency_factor": inner.number("high_freq_factor"),
    }


def _yarn(inner: Keys, positions: int) -> Section:
    if not inner.flag("truncate", default=True):
        raise inner.wrong("truncate", "this variant of yarn is not supported")
    return {
        "original_length": inner.integer("original_max_position_embeddings", positions),
        "beta_fast": inner.number("beta_fast", 32.0),
        "beta_slow": inner.number("beta_slow", 1.0),
    }


def _scales(inner: Keys, factor: float, of_deepseek: bool) -> Iterator[tuple[str, float]]:
    """yarn's `attention_factor`, and DeepSeek's `mscale_all_dim`. Both mscales make scales, 0.1 mscale ln(factor) + 1:
    what is rotated has their quotient, and scores the square of the second one."""
    for key in () if of_deepseek else ("mscale", "mscale_all_dim"):
        if inner.get(key) is not None:
            raise inner.wrong(key, "this variant of yarn is not supported")
    if inner.get("attention_factor") is not None:
        yield "attention_factor", inner.number("attention_factor")
    elif inner.get("mscale") and inner.get("mscale_all_dim"):
        logarithm = 0.1 * math.log(factor)
        scales = [inner.number(key) * logarithm + 1.0 for key in ("mscale", "mscale_all_dim")]
        yield "attention_factor", scales[0] / scales[1]
    elif inner.get("mscale_all_dim") or inner.get("mscale", 1.0) != 1.0:
        key, other = ("mscale_all_dim", "mscale") if inner.get("mscale_all_dim") else ("mscale", "mscale_all_dim")
        raise inner.wrong(key, f"without {other}, its meaning depends on the code that reads it; give both")
    if inner.get("mscale_all_dim"):
        yield "mscale_all_dim", inner.number("mscale_all_dim")


_SCALINGS: dict[str, Callable[[Keys, int], Section]] = {
    "linear": lambda inner, positions: {},
    "llama3": _llama3,
    "yarn": _yarn,
}


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def huggingface_config(spec: JobSpec, dtype: str, positions: int | None = None) -> Section:
    """The config.json of the job's model, whose weights are saved as `dtype` (as torch calls it). `positions`: tokens
    in the longest sequence that it is meant for; default: the job's. Raises WeightsError if transformers has no model
    that computes the same."""
    model = spec.model
    positions = max(positions or _stretched(model), model.sequence_length)
    if model.family == "gpt":
        return _gpt2_config(spec, dtype)
    if model.family == "deepseek":
        return _deepseek_config(spec, dtype, positions)
    if model.family not in ("llama", "qwen"):
        raise _cannot(f"model.family {model.family}")
    kind = _kind_of(model)
    if model.bias and kind != "llama":
        raise _cannot(f"model.bias with {_TITLES[kind]}")
    if kind in ("mistral", "mixtral", "qwen3_moe") and model.full_attention_every is not None:
        raise _cannot(f"model.full_attention_every with {_TITLES[kind]}")
    config = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": spec.vocabulary_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": 0.0,
        **_rope_keys(model.rope_or_default),
    }
    if kind == "llama":
        config |= {"attention_bias": model.bias, "mlp_bias": model.bias}
    elif kind == "mistral":
        config |= {"sliding_window": model.sliding_window}
    elif kind == "mixtral":
        config |= {"sliding_window": model.sliding_window, **_mixtral_experts(model)}
    elif kind == "qwen3_moe":
        windows = {"use_sliding_window": model.sliding_window is not None, "sliding_window": model.sliding_window}
        config |= {"attention_bias": False, **windows, **_qwen_experts_keys(model)}
    else:
        config |= {"attention_bias": False, **_qwen_windows(model)}
    return config | _common(model, dtype)


_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}
_TITLES = {
    "mistral": "Mistral (sliding_window)",
    "mixtral": "Mixtral (family llama with moe)",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 with moe",
}


def _kind_of(model: ModelConfig) -> str:
    """`model_type` of a model of family llama or qwen."""
    if model.family == "qwen":
        return "qwen3" if model.moe is None else "qwen3_moe"
    if model.moe is not None:
        return "mixtral"
    return "llama" if model.sliding_window is None else "mistral"


def _only(moe: MoeConfig, what: str, **needed: Any) -> None:
    """Raises WeightsError if experts have anything that `what` has not: these keys with other values, or a bias."""
    for key, value in needed.items():
        if getattr(moe, key) != value:
            raise _cannot(f"model.moe.{key} {json.dumps(getattr(moe, key))} with {what}")
    if moe.shared_gate or (moe.shared and moe.shared_size != moe.shared * moe.ffn_hidden_size):
        raise _cannot(f"model.moe.{'shared_gate' if moe.shared_gate else 'shared_ffn_hidden_size'} with {what}")


def _mixtral_experts(model: ModelConfig) -> Section:
    moe, what = model.moe, _TITLES["mixtral"]
    assert moe is not None
    _only(moe, what, first_dense=0, every=1, normalise=True, **_PLAIN)
    if model.has_router_bias:
        raise _cannot(f"model.moe.balance.bias_rate with {what}")
    counts = {"num_local_experts": moe.experts, "num_experts_per_tok": moe.per_token}
    return {"intermediate_size": moe.ffn_hidden_size, **counts}


def _qwen_experts_keys(model: ModelConfig) -> Section:
    moe, what = model.moe, _TITLES["qwen3_moe"]
    assert moe is not None
    _only(moe, what, **_PLAIN)
    if model.has_router_bias:
        raise _cannot(f"model.moe.balance.bias_rate with {what}")
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.per_token,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "norm_topk_prob": moe.normalise,
        "decoder_sparse_step": moe.every,
        "mlp_only_layers": list(range(min(moe.first_dense, model.layers))),
    }


_PLAIN: Section = {"score": "softmax", "shared": 0, "groups": 1, "groups_per_token": 1, "scale": 1.0}


def _deepseek_config(spec: JobSpec, dtype: str, positions: int) -> Section:
    model, moe, latent = spec.model, spec.model.moe, spec.model.latent_attention
    assert latent is not None
    if model.sliding_window is not None:
        raise _cannot("model.sliding_window with family deepseek")
    if moe is not None:
        _only(moe, "family deepseek", every=1, score="sigmoid")
        if not moe.shared:
            raise _cannot("model.moe.shared 0 with family deepseek")
        if moe.groups == moe.experts:
            raise _cannot("model.moe.groups of one expert each with family deepseek")
    return {
        "architectures": [_CLASSES["deepseek_v3"]],
        "model_type": "deepseek_v3",
        "vocab_size": spec.vocabulary_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "moe_intermediate_size": moe.ffn_hidden_size if moe else model.ffn_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "n_routed_experts": moe.experts if moe else 1,
        "n_shared_experts": moe.shared if moe else 1,
        "num_experts_per_tok": moe.per_token if moe else 1,
        "first_k_dense_replace": min(moe.first_dense, model.layers) if moe else model.layers,
        "norm_topk_prob": moe.normalise if moe else True,
        "routed_scaling_factor": moe.scale if moe else 1.0,
        "n_group": moe.groups if moe else 1,
        "topk_group": moe.groups_per_token if moe else 1,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_rope_head_dim": latent.rope_size,
        "qk_nope_head_dim": latent.nope_size,
        "v_head_dim": latent.value_size,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": positions,
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": 0.0,
        **_OF_DEEPSEEK,
        **_rope_keys(model.rope_or_default),
        **_common(model, dtype),
    }


def _stretched(model: ModelConfig) -> int:
    """Tokens that yarn is meant for: transformers 4 uses this, divided by the original length, as its factor."""
    scaling = model.rope_or_default.scaling
    if scaling is None or scaling.type != "yarn" or scaling.original_length is None:
        return 0
    return round(scaling.factor * scaling.original_length)


def _gpt2_config(spec: JobSpec, dtype: str) -> Section:
    model = spec.model
    if model.key_value_heads != model.heads:
        raise _cannot("model.kv_heads with family gpt")
    if model.attention_width != model.hidden_size:
        raise _cannot("a model.head_dim other than hidden_size / heads with family gpt")
    if model.sliding_window is not None:
        raise _cannot("model.sliding_window with family gpt")
    return {
        "architectures": [_CLASSES["gpt2"]],
        "model_type": "gpt2",
        "vocab_size": spec.vocabulary_size,
        "n_positions": model.sequence_length,
        "n_embd": model.hidden_size,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn_size,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[model.activation],
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        **_common(model, dtype),
    }


def _common(model: ModelConfig, dtype: str) -> Section:
    # Without them the classes use the ids of the tokenizers that they were made for.
    tokens = dict.fromkeys(TOKENS)
    return {"tie_word_embeddings": model.tie_embeddings, "torch_dtype": dtype, "use_cache": True, **tokens}


def _rope_keys(rope: RopeConfig) -> Section:
    scaling = rope.scaling
    if scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    theirs: Section = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type != "linear":
        theirs["original_max_position_embeddings"] = scaling.original_length
    if scaling.type == "llama3":
        theirs |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
    if scaling.type == "yarn":
        theirs |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        attention_factor = scaling.attention_factor
        if scaling.mscale_all_dim is not None:
            theirs["mscale_all_dim"] = scaling.mscale_all_dim
            if attention_factor == 1.0:  # as DeepSeek's own code, and what follows it, expects it
                theirs["mscale"], attention_factor = scaling.mscale_all_dim, None
            elif attention_factor is None:
                attention_factor = 0.1 * math.log(scaling.factor) + 1.0
        if attention_factor is not None:
            theirs["attention_factor"] = attention_factor
    return {"rope_theta": rope.theta, "rope_scaling": theirs}


def _qwen_windows(model: ModelConfig) -> Section:
    every = model.full_attention_every
    sliding = [model.sliding_window is not None and not (every and n % every == 0) for n in range(1, model.layers + 1)]
    return {
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "max_window_layers": sliding.index(True) if True in sliding else model.layers,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sliding],
    }


def _cannot(what: str) -> WeightsError:
    return WeightsError(f"{what}: no model in transformers supports it; export as dcp or safetensors")
