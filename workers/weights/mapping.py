"""Which rows of our tensors correspond to which rows of theirs: names and orders of Hugging Face's GPT-2, Llama,
Mistral, Mixtral, Qwen 3 with and without experts, and DeepSeek V3. Pure Python, and only data: both reading and writing
use it.

Our fused projections have their rows in the order (head, q/k/v, d), those of keys and values (key-value head, k/v, d);
theirs have one tensor of (head, d) for each, or, in GPT-2, one of (q/k/v, head, d) that is transposed. Rotary positions
turn our elements i and i + p/2 together, but DeepSeek's elements 2 i and 2 i + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Literal

from manta.workers.config import JobSpec, ModelConfig
from manta.workers.spec.layer_table import ADAPTED, layer_table

Format = Literal["hf", "safetensors", "adapter"]
"""Format of exported weights. hf: what transformers reads; safetensors: our tensors with our names; adapter: low-rank
adapters alone, in the format of PEFT."""
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
    their_stride: int = 0
    """Rows of their tensor from the beginning of one block to the beginning of the next; 0: they follow each other."""

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Our rows in [start, end) that are in the piece, run by run: (our row, their row, rows)."""
        block = max(0, (start - self.first) // self.stride)
        while block < self.count:
            row = self.first + block * self.stride
            low, high = max(row, start), min(row + self.length, end)
            if row >= end:
                return
            if low < high:
                yield low, self.at + block * (self.their_stride or self.length) + low - row, high - low
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
    dtype: str | None = None
    """In which it is written, as torch calls it, whatever the others are; None: in that of the others."""

    @property
    def rows_first(self) -> tuple[int, ...]:
        """The tensor's shape in our order."""
        return self.shape[::-1] if self.transposed else self.shape


def huggingface_tensors(spec: JobSpec) -> list[HuggingFaceTensor]:
    """All tensors of the job's model with the names of transformers, in the model's order. The model must exist there
    (`config.huggingface_config` says whether it does)."""
    model, vocabulary, h = spec.model, spec.vocabulary_size, spec.model.hidden_size
    is_gpt2 = model.family == "gpt"
    them = "transformer.h" if is_gpt2 else "model.layers"
    tokens = "transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"
    names = [unchanged(tokens, "embedding.token.weight", vocabulary, h)]
    if is_gpt2:
        positions = unchanged("transformer.wpe.weight", "embedding.position.weight", model.sequence_length, h)
        names.append(replace(positions, may_be_longer=True))
    for layer in range(model.layers):
        names += _of_layer(model, layer, _groups(model, layer), f"{them}.{layer}.", is_gpt2)
        if model.has_router_bias and model.has_experts(layer):
            names.append(_router_bias(model, layer, f"{them}.{layer}."))
    names.append(unchanged("transformer.ln_f.weight" if is_gpt2 else "model.norm.weight", "final_norm.weight", h))
    if is_gpt2:
        bias = unchanged("transformer.ln_f.bias", "final_norm.bias", h)
        names.append(bias if model.bias else replace(bias, pieces=()))
    return names if model.tie_embeddings else [*names, unchanged("lm_head.weight", "output.weight", vocabulary, h)]


_Groups = tuple[dict[str, tuple[str, ...]], ...]
"""The tensors of a layer in their order: their names, each with the norm or the logical matrices of ours whose rows it
has one after the other. Of a group all weights come before all biases, so that each of ours is read once."""
ROUTER_BIAS = "router_bias"
"""Our name of what is added to the scores of experts for their choice, of all layers; not a parameter."""
_ATTENTION: _Groups = (
    {"input_layernorm": ("attention_norm",)},
    {
        "self_attn.q_proj": ("attention.q",),
        "self_attn.k_proj": ("attention.k",),
        "self_attn.v_proj": ("attention.v",),
    },
    {"self_attn.o_proj": ("attention.output",)},
    {"self_attn.q_norm": ("attention.q_norm",)},
    {"self_attn.k_norm": ("attention.k_norm",)},
    {"post_attention_layernorm": ("mlp_norm",)},
)
_MLP: _Groups = (
    {"mlp.gate_proj": ("mlp.gate",)},
    {"mlp.up_proj": ("mlp.up",)},
    {"mlp.down_proj": ("mlp.down",)},
)
_GPT2: _Groups = (
    {"ln_1": ("attention_norm",)},
    {"attn.c_attn": ("attention.q", "attention.k", "attention.v")},
    {"attn.c_proj": ("attention.output",)},
    {"ln_2": ("mlp_norm",)},
    {"mlp.c_fc": ("mlp.up",)},
    {"mlp.c_proj": ("mlp.down",)},
)


def _groups(model: ModelConfig, layer: int) -> _Groups:
    """Tensors of a layer."""
    if model.family == "gpt":
        return _GPT2
    attention = _ATTENTION if model.latent_attention is None else _latent_attention(model)
    return (*attention, *(_experts(model) if model.has_experts(layer) else _MLP))


def _latent_attention(model: ModelConfig) -> _Groups:
    short = model.latent_attention is not None and model.latent_attention.q_rank is not None
    return (
        {"input_layernorm": ("attention_norm",)},
        {"self_attn.q_a_proj": ("attention.q_down",)},
        {"self_attn.q_a_layernorm": ("attention.q_norm",)},
        {"self_attn.q_b_proj" if short else "self_attn.q_proj": ("attention.q_up",)},
        {"self_attn.kv_a_proj_with_mqa": ("attention.kv_down",)},
        {"self_attn.kv_a_layernorm": ("attention.kv_norm",)},
        {"self_attn.kv_b_proj": ("attention.kv_up",)},
        {"self_attn.o_proj": ("attention.output",)},
        {"post_attention_layernorm": ("mlp_norm",)},
    )


def _experts(model: ModelConfig) -> _Groups:
    moe, mixtral = model.moe, model.family == "llama"
    assert moe is not None
    them = "block_sparse_moe" if mixtral else "mlp"
    names = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else {each: f"{each}_proj" for each in _MATRICES}
    groups: list[dict[str, tuple[str, ...]]] = [{f"{them}.gate": ("mlp.router",)}]
    for number, ours in product(range(moe.experts), _MATRICES):
        groups.append({f"{them}.experts.{number}.{names[ours]}": (f"mlp.experts.{number}.{ours}",)})
    groups += ({f"{them}.shared_experts.{each}_proj": (f"mlp.shared.{each}",)} for each in _MATRICES)
    return tuple(groups)


_MATRICES = ("gate", "up", "down")


def _router_bias(model: ModelConfig, layer: int, them: str) -> HuggingFaceTensor:
    experts, place = model.moe.experts if model.moe else 0, model.expert_layers.index(layer)
    piece = Piece(0, ROUTER_BIAS, place * experts, experts, experts, 1)
    return HuggingFaceTensor(f"{them}mlp.gate.e_score_correction_bias", (experts,), (piece,), dtype="float32")


@dataclass(frozen=True)
class LinearModule:
    """A linear layer of transformers' model, which may be several logical matrices of ours."""

    name: str
    matrices: dict[str, int]
    """The rows of each logical matrix, by its name in the whole model, in the order in which theirs has them."""
    columns: int


def linear_modules(model: ModelConfig) -> list[LinearModule]:
    """The linear layers that have targets of `train.lora`, of all layers, in the model's order, in our orientation:
    [rows, columns]."""
    them, modules, targets = "transformer.h" if model.family == "gpt" else "model.layers", [], set(ADAPTED.values())
    for layer, group in ((n, group) for n in range(model.layers) for group in _groups(model, n)):
        known = layer_table(model, 1, layer).logical_matrices
        for name, sources in group.items():
            if sources[0] in known and sources[0] in targets:
                rows = {f"layers.{layer}.{each}": known[each][1].length * known[each][1].blocks for each in sources}
                modules.append(LinearModule(f"{them}.{layer}.{name}", rows, known[sources[0]][0].columns))
    return modules


def pieces_of(model: ModelConfig) -> dict[str, list[tuple[str, Piece]]]:
    """For the weight of each linear layer, by its name, the logical matrices that it has, by theirs, and their rows."""
    pieces: dict[str, list[tuple[str, Piece]]] = {}
    for layer in range(model.layers):
        for name, (weight, part) in layer_table(model, 1, layer).logical_matrices.items():
            if not weight.is_vector:
                ours = f"layers.{layer}.{weight.name}.weight"
                piece = Piece(0, ours, part.first, part.length, part.stride, part.blocks)
                pieces.setdefault(ours, []).append((f"layers.{layer}.{name}", piece))
    return pieces


def _of_layer(model: ModelConfig, layer: int, groups: _Groups, them: str, is_gpt2: bool) -> Iterator[HuggingFaceTensor]:
    """Tensors of a layer, whose names begin with `them`. GPT-2's matrices are transposed, and it always has biases."""
    known = layer_table(model, 1, layer).logical_matrices
    for group, end in product(groups, ("weight", "bias")):
        for name, sources in group.items():
            if sources[0] not in known:
                continue
            parts = [known[source] for source in sources]
            (weight, _), ours = parts[0], f"layers.{layer}.{parts[0][0].name}.{end}"
            *starts, rows = accumulate((part.length * part.blocks for _, part in parts), initial=0)
            pieces = tuple(
                Piece(at, ours, part.first, part.length, part.stride, part.blocks)
                for at, (_, part) in zip(starts, parts, strict=True)
            )
            if model.latent_attention is not None and sources[0] in _ROTATED:
                pieces = tuple(_interleaved(model, ours, rows))
            if end == "weight":
                shape = (rows,) if weight.is_vector else (rows, weight.columns)
                transposed = is_gpt2 and not weight.is_vector
                yield HuggingFaceTensor(
                    f"{them}{name}.weight", shape[::-1] if transposed else shape, pieces, transposed
                )
            elif weight.has_bias or is_gpt2:
                yield HuggingFaceTensor(f"{them}{name}.bias", (rows,), pieces if weight.has_bias else ())


_ROTATED = ("attention.q_up", "attention.kv_down")
"""Our matrices with rows that make what rotary positions turn, of latent attention."""


def _interleaved(model: ModelConfig, ours: str, rows: int) -> Iterator[Piece]:
    """Pieces of one of these: each block of rows has some in the same order, and then those of what is turned."""
    latent = model.latent_attention
    assert latent is not None
    turned, before = latent.rope_size, latent.nope_size if "q_up" in ours else latent.kv_rank
    stride = before + turned
    blocks = rows // stride
    yield Piece(0, ours, 0, before, stride, blocks, stride)
    for number in range(turned):
        theirs = 2 * number if number < turned // 2 else 2 * number - turned + 1
        yield Piece(before + theirs, ours, before + number, 1, stride, blocks, stride)


Uses = dict[str, list[tuple[HuggingFaceTensor, Piece]]]
"""By our names, what each is converted into, or from."""


def uses_of(tensors: Iterable[HuggingFaceTensor]) -> Uses:
    """The pieces of these tensors, by the names of ours that they are of."""
    uses: Uses = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            uses.setdefault(piece.ours, []).append((tensor, piece))
    return uses


def unchanged(theirs: str, ours: str, *shape: int) -> HuggingFaceTensor:
    """One of their tensors that is the same as one of ours, of this shape."""
    return HuggingFaceTensor(theirs, shape, (Piece(0, ours, 0, shape[0], shape[0], 1),))
