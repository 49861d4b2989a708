"""`transformers`' GPT-2 in the shape of a job, without dropout: another's model to be measured beside."""

from __future__ import annotations

from typing import Any

from workers.config import JobSpec


def gpt2_like(spec: JobSpec) -> Any:
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
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config)
