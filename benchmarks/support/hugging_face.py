"""Models of `transformers` in the shape of a job, without dropout: another implementation to compare with."""

from __future__ import annotations

from typing import Any

from manta.workers.config import JobSpec


def gpt2_like(spec: JobSpec, attention: str = "sdpa") -> Any:
    """GPT2LMHeadModel of the spec's shape, which has as many key-value heads as heads. Raises ImportError without
    transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = spec.model
    config = GPT2Config(
        vocab_size=spec.vocabulary_size,
        n_positions=model.sequence_length,
        n_embd=model.hidden_size,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.ffn_size,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config)


def llama_like(spec: JobSpec, attention: str = "sdpa") -> Any:
    """LlamaForCausalLM of the spec's shape. Raises ImportError without transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = spec.model
    config = LlamaConfig(
        vocab_size=spec.vocabulary_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        head_dim=model.head_size,
        max_position_embeddings=model.sequence_length,
        rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=model.tie_embeddings,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def transformers_like(spec: JobSpec, attention: str = "sdpa") -> Any:
    """Model of the spec's family and shape. Raises ImportError without transformers."""
    return gpt2_like(spec, attention) if spec.model.family == "gpt" else llama_like(spec, attention)


def causal_attention() -> str:
    """Name of an attention like "sdpa" that is never given a mask, which under torch.compile "sdpa" is, even where all
    that it says is that no token sees those after it; and the kernels that are made for that take no masks."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    name = "sdpa_causal"
    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, lambda *arguments, **named: None)
    return name
