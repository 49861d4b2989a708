"""The section `model` of a JobSpec -> config.json, readable by both transformers 4 and 5. Pure Python."""

from __future__ import annotations

from typing import Any

from manta.workers.config import JobSpec, ModelConfig, RopeConfig
from manta.workers.errors import WeightsError

Config = dict[str, Any]

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def huggingface_config(spec: JobSpec, dtype: str, positions: int | None = None) -> Config:
    """The config.json of the job's model, whose weights are saved as `dtype` (as torch calls it). `positions`: tokens
    in the longest sequence that it is meant for; default: the job's. Raises WeightsError if transformers has no model
    that computes the same."""
    model = spec.model
    positions = max(positions or _stretched(model), model.sequence_length)
    if model.family == "gpt":
        return _gpt2(spec, dtype)
    if model.family not in ("llama", "qwen"):
        raise _cannot(f"model.family {model.family}")
    kind = "qwen3" if model.family == "qwen" else "llama" if model.sliding_window is None else "mistral"
    if model.bias and kind != "llama":
        raise _cannot(f"model.bias with {'Qwen 3' if kind == 'qwen3' else 'Mistral (sliding_window)'}")
    if kind == "mistral" and model.full_attention_every is not None:
        raise _cannot("model.full_attention_every with family llama")
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
        **_rope(model.rope_or_default),
    }
    if kind == "llama":
        config |= {"attention_bias": model.bias, "mlp_bias": model.bias}
    elif kind == "mistral":
        config |= {"sliding_window": model.sliding_window}
    else:
        config |= {"attention_bias": False, **_qwen_windows(model)}
    return config | _common(model, dtype)


_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _stretched(model: ModelConfig) -> int:
    """Tokens that yarn is meant for: transformers 4 uses this, divided by the original length, as its factor."""
    scaling = model.rope_or_default.scaling
    if scaling is None or scaling.type != "yarn" or scaling.original_length is None:
        return 0
    return round(scaling.factor * scaling.original_length)


def _gpt2(spec: JobSpec, dtype: str) -> Config:
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


def _common(model: ModelConfig, dtype: str) -> Config:
    # Without them the classes use the ids of the tokenizers that they were made for.
    tokens = dict.fromkeys(TOKENS)
    return {"tie_word_embeddings": model.tie_embeddings, "torch_dtype": dtype, "use_cache": True, **tokens}


def _rope(rope: RopeConfig) -> Config:
    scaling = rope.scaling
    if scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    theirs: Config = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type != "linear":
        theirs["original_max_position_embeddings"] = scaling.original_length
    if scaling.type == "llama3":
        theirs |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
    if scaling.type == "yarn":
        theirs |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            theirs["attention_factor"] = scaling.attention_factor
    return {"rope_theta": rope.theta, "rope_scaling": theirs}


def _qwen_windows(model: ModelConfig) -> Config:
    every = model.full_attention_every
    sliding = [model.sliding_window is not None and not (every and n % every == 0) for n in range(1, model.layers + 1)]
    return {
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "max_window_layers": sliding.index(True) if True in sliding else model.layers,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sliding],
    }


def _cannot(what: str) -> WeightsError:
    return WeightsError(f"{what}: no model of transformers computes that; export it as dcp or safetensors")
