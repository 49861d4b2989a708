"""Which rows of our tensors correspond to which rows of theirs: names and orders of Hugging Face's GPT-2, Llama,
Mistral and Qwen 3. Pure Python, and only data: both reading and writing use it.

Our fused projections have their rows in the order (head, q/k/v, d), those of keys and values (key-value head, k/v, d);
theirs have one tensor of (head, d) for each, or, in GPT-2, one of (q/k/v, head, d) that is transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from manta.workers.config import JobSpec, ModelConfig

Format = Literal["hf", "safetensors"]
"""Format of exported weights. hf: what transformers reads; safetensors: our tensors with our names."""
Dtype = Literal["fp32", "bf16", "fp16"]
"""Dtype of exported weights."""


@dataclass(frozen=True)
class Piece:
    """Blocks of rows of one of our tensors that are consecutive in one of theirs."""

    at: int
    """First row in their tensor."""
    ours: str
    """Name of our tensor."""
    first: int
    """First row of the first block in our tensor."""
    length: int
    """Rows of a block."""
    stride: int
    """Rows of our tensor from the beginning of one block to the beginning of the next."""
    count: int
    """Number of blocks."""

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Our rows in [start, end) that are in the piece, run by run: (our row, their row, rows)."""
        block = max(0, (start - self.first) // self.stride)
        while block < self.count:
            row = self.first + block * self.stride
            low, high = max(row, start), min(row + self.length, end)
            if row >= end:
                return
            if low < high:
                yield low, self.at + block * self.length + low - row, high - low
            block += 1


@dataclass(frozen=True)
class HuggingFaceTensor:
    """One of their tensors, made of our rows."""

    name: str
    shape: tuple[int, ...]
    """The shape in their file."""
    pieces: tuple[Piece, ...]
    """Together they are the whole tensor; none if ours has nothing for it, and it is zero."""
    transposed: bool = False
    """Whether their file has rows as columns (GPT-2's Conv1D)."""
    may_be_longer: bool = False
    """Whether their tensor may have more rows than we use: positions beyond our sequences."""

    @property
    def rows_first(self) -> tuple[int, ...]:
        """The tensor's shape in our order."""
        return self.shape[::-1] if self.transposed else self.shape


def huggingface_tensors(spec: JobSpec) -> list[HuggingFaceTensor]:
    """All tensors of the job's model with the names of transformers, in the model's order. The model must exist there
    (`config_export.huggingface_config` says whether it does)."""
    model, vocabulary = spec.model, spec.vocabulary_size
    if model.family == "gpt":
        return _gpt2(model, vocabulary)
    return _llama(model, vocabulary)


def _llama(model: ModelConfig, vocabulary: int) -> list[HuggingFaceTensor]:
    hidden, inner, names = (
        model.hidden_size,
        model.ffn_size,
        [_whole("model.embed_tokens.weight", _TOKEN, vocabulary, model)],
    )
    for n in range(model.layers):
        ours, them = f"layers.{n}.", f"model.layers.{n}."
        names.append(_whole(f"{them}input_layernorm.weight", f"{ours}attention_norm.weight", hidden))
        names += _projections(model, f"{ours}attention.", f"{them}self_attn.")
        names += _linear(model, f"{them}self_attn.o_proj", f"{ours}attention.output", hidden, model.attention_width)
        if model.parts.query_key_norm:
            names.append(_whole(f"{them}self_attn.q_norm.weight", f"{ours}attention.q_norm.weight", model.head_size))
            names.append(_whole(f"{them}self_attn.k_norm.weight", f"{ours}attention.k_norm.weight", model.head_size))
        names.append(_whole(f"{them}post_attention_layernorm.weight", f"{ours}mlp_norm.weight", hidden))
        names += _linear(model, f"{them}mlp.gate_proj", f"{ours}mlp.gate", inner, hidden)
        names += _linear(model, f"{them}mlp.up_proj", f"{ours}mlp.up", inner, hidden)
        names += _linear(model, f"{them}mlp.down_proj", f"{ours}mlp.down", hidden, inner)
    names.append(_whole("model.norm.weight", "final_norm.weight", hidden))
    return [*names, *_head(model, vocabulary)]


def _gpt2(model: ModelConfig, vocabulary: int) -> list[HuggingFaceTensor]:
    hidden, inner, length = model.hidden_size, model.ffn_size, model.sequence_length
    positions = _piece("embedding.position.weight", length)
    names = [
        _whole("transformer.wte.weight", _TOKEN, vocabulary, model),
        HuggingFaceTensor("transformer.wpe.weight", (length, hidden), (positions,), may_be_longer=True),
    ]
    for n in range(model.layers):
        ours, them = f"layers.{n}.", f"transformer.h.{n}."
        names += _norm(model, f"{them}ln_1", f"{ours}attention_norm")
        names += _conv1d(model, f"{them}attn.c_attn", 3 * hidden, hidden, _fused(model, f"{ours}attention.qkv"))
        names += _conv1d(model, f"{them}attn.c_proj", hidden, hidden, [_piece(f"{ours}attention.output", hidden)])
        names += _norm(model, f"{them}ln_2", f"{ours}mlp_norm")
        names += _conv1d(model, f"{them}mlp.c_fc", inner, hidden, [_piece(f"{ours}mlp.up", inner)])
        names += _conv1d(model, f"{them}mlp.c_proj", hidden, inner, [_piece(f"{ours}mlp.down", hidden)])
    names += _norm(model, "transformer.ln_f", "final_norm")
    return [*names, *_head(model, vocabulary)]


_TOKEN = "embedding.token.weight"


def _head(model: ModelConfig, vocabulary: int) -> list[HuggingFaceTensor]:
    return [] if model.tie_embeddings else [_whole("lm_head.weight", "output.weight", vocabulary, model)]


def _piece(ours: str, rows: int) -> Piece:
    return Piece(0, ours, 0, rows, rows, 1)


def _whole(theirs: str, ours: str, rows: int, of: ModelConfig | None = None) -> HuggingFaceTensor:
    """One of their tensors with our rows in the same order: a vector, or with `of` a matrix of hidden_size columns."""
    shape = (rows,) if of is None else (rows, of.hidden_size)
    return HuggingFaceTensor(theirs, shape, (_piece(ours, rows),))


def _linear(model: ModelConfig, theirs: str, ours: str, rows: int, columns: int) -> Iterator[HuggingFaceTensor]:
    yield HuggingFaceTensor(f"{theirs}.weight", (rows, columns), (_piece(f"{ours}.weight", rows),))
    if model.bias:
        yield HuggingFaceTensor(f"{theirs}.bias", (rows,), (_piece(f"{ours}.bias", rows),))


def _norm(model: ModelConfig, theirs: str, ours: str) -> Iterator[HuggingFaceTensor]:
    """A layer norm; GPT-2's always have biases."""
    yield _whole(f"{theirs}.weight", f"{ours}.weight", model.hidden_size)
    bias = (_piece(f"{ours}.bias", model.hidden_size),) if model.bias else ()
    yield HuggingFaceTensor(f"{theirs}.bias", (model.hidden_size,), bias)


def _conv1d(
    model: ModelConfig, theirs: str, rows: int, columns: int, pieces: list[Piece]
) -> Iterator[HuggingFaceTensor]:
    """A linear layer of GPT-2, which always has biases; `pieces` name ours without the ".weight"."""
    yield HuggingFaceTensor(f"{theirs}.weight", (columns, rows), _named(pieces, ".weight"), transposed=True)
    yield HuggingFaceTensor(f"{theirs}.bias", (rows,), _named(pieces, ".bias") if model.bias else ())


def _named(pieces: list[Piece], end: str) -> tuple[Piece, ...]:
    return tuple(Piece(p.at, p.ours + end, p.first, p.length, p.stride, p.count) for p in pieces)


def _fused(model: ModelConfig, ours: str) -> list[Piece]:
    """Our rows (head, q/k/v, d) as (q/k/v, head, d)."""
    size, heads = model.head_size, model.heads
    return [Piece(part * heads * size, ours, part * size, size, 3 * size, heads) for part in range(3)]


def _projections(model: ModelConfig, ours: str, them: str) -> Iterator[HuggingFaceTensor]:
    """Queries, keys and values, which have one tensor each."""
    size, heads, groups = model.head_size, model.heads, model.key_value_heads
    if groups == heads:
        parts = [Piece(0, f"{ours}qkv", part * size, size, 3 * size, heads) for part in range(3)]
    else:
        parts = [_piece(f"{ours}q", heads * size)]
        parts += [Piece(0, f"{ours}kv", part * size, size, 2 * size, groups) for part in range(2)]
    # All weights before all biases, so that each of ours is read once.
    for end in (".weight", ".bias") if model.bias else (".weight",):
        for kind, part in zip("qkv", parts, strict=True):
            shape = (part.length * part.count, model.hidden_size)[: 2 if end == ".weight" else 1]
            yield HuggingFaceTensor(f"{them}{kind}_proj{end}", shape, _named([part], end))
