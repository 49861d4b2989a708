"""What a transformer layer of the built-in families consists of: one table of its operations. Pure Python.

Everything that is known of a layer without running it is computed from this table: names and sizes of parameters
(`parameters.py`), FLOPs, bytes saved for backward and peak memory (`workers/accounting/`), estimates of time
(`service/planner/layer_time.py`, `engine_passes.py`), rows of weights in files (`workers/weights/mapping.py`).
`tests/workers/spec/test_layer_table.py` compares the table with the modules of `workers/model/`.

Sizes are those of one of t tensor ranks. Shapes: h hidden, a heads, g key-value heads, d head size, f inner width of
the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from manta.workers.config import JobSpec, LoraConfig, LoraTarget, ModelConfig

ADAPTED: dict[LoraTarget, str] = {
    "q": "attention.q",
    "k": "attention.k",
    "v": "attention.v",
    "o": "attention.output",
    "gate": "mlp.gate",
    "up": "mlp.up",
    "down": "mlp.down",
}
"""The logical matrix of each target of `train.lora`."""


class Tensor(NamedTuple):
    """An activation: the input or the result of an operation."""

    name: str
    columns: int
    """Elements per token."""
    own: bool = False
    """Whether a rank has only its own tokens of it: with sequence parallelism a t-th of the sequence."""
    recomputed_by: str = ""
    """The module of `parallel.recompute_modules` under which backward recomputes it; empty: none."""
    part_of: Tensor | None = None
    """The larger tensor whose memory it is a part of."""


class Rows(NamedTuple):
    """A logical matrix within a weight: `blocks` of consecutive rows."""

    name: str
    first: int
    """First row of the first block."""
    length: int
    """Rows of a block."""
    stride: int
    """Rows from the beginning of one block to the beginning of the next."""
    blocks: int


class Weight(NamedTuple):
    """The weight of a linear layer, [rows, columns], or of a norm, [rows]."""

    name: str
    """Name within the layer, without `.weight`."""
    rows: int
    columns: int
    has_bias: bool
    """Whether there is a bias of as many elements as there are rows."""
    parts: tuple[Rows, ...]
    """The logical matrices that its rows are made of."""
    copies: int = 1
    """Tensor ranks that hold the same rows."""
    is_vector: bool = False
    """Whether it has no second dimension; `columns` is 1 then."""
    adapters: tuple[Rows, ...] = ()
    """Logical matrices of the weight that have an adapter (`train.lora`)."""
    rank: int = 0
    """Rank r of the adapters."""

    @property
    def elements(self) -> int:
        """Elements of the weight, without its bias."""
        return self.rows * self.columns

    @property
    def adapter_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of its adapters' matrices A [r, columns] and B [rows, r], by their names within the layer."""
        shapes = {}
        for each in self.adapters:
            shapes[f"{each.name}.lora_a"] = self.rank, self.columns
            shapes[f"{each.name}.lora_b"] = each.length * each.blocks, self.rank
        return shapes


@dataclass(frozen=True)
class Norm:
    """A norm over groups of `size` elements; backward needs its input and statistics of each group."""

    name: str
    x: Tensor
    """What holds the input: the result may be of a part of it."""
    y: Tensor
    size: int
    rms: bool
    """An RMS norm, which only scales, instead of a layer norm."""
    has_bias: bool = False

    @property
    def weight(self) -> Weight:
        """The weight, which every group is multiplied by."""
        return Weight(self.name, self.size, 1, self.has_bias, (_all_rows(self.name, self.size),), is_vector=True)

    @property
    def groups(self) -> int:
        """Groups per token."""
        return self.y.columns // self.size

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of what backward needs of each group, one fp32 number each."""
        return (f"{self.name}_inverse_root",) if self.rms else (f"{self.name}_mean", f"{self.name}_inverse_deviation")


@dataclass(frozen=True)
class Products:
    """Products of one input with weights. Backward needs the input for the gradients of those that are trained."""

    x: Tensor
    ys: tuple[Tensor, ...]
    """The result of each weight."""
    weights: tuple[Weight, ...]
    sums: bool
    """Weights are split over tensor ranks by columns, and results are summed over ranks; otherwise weights are split by
    rows, and with sequence parallelism the input is gathered."""
    projects: bool = False
    """Makes queries, keys and values, or the short vectors that these are made from."""
    whole: bool = False
    """Every tensor rank has all of the weights, and computes results of its own tokens."""
    shares_input: bool = False
    """Whether earlier products have this input too, with communication of their own."""

    @property
    def adapters(self) -> dict[str, tuple[int, int]]:
        """Shapes of all adapters' matrices, by their names within the layer."""
        return {name: shape for each in self.weights for name, shape in each.adapter_shapes.items()}

    @property
    def inner_columns(self) -> int:
        """Columns of the inputs' products with A, of all adapters together."""
        return sum(each.rank * len(each.adapters) for each in self.weights)

    @property
    def copied_columns(self) -> int:
        """Most columns of the part of a result that an adapter is beside, if it is not all of that weight's result."""
        parts = ((each, rows.length * rows.blocks) for each in self.weights for rows in each.adapters)
        return max((columns for each, columns in parts if columns < each.rows), default=0)


@dataclass(frozen=True)
class Rotary:
    """Rotation of queries and keys by their positions, in place as far as backward is concerned, which needs nothing of
    it."""

    turned: tuple[tuple[int, int], ...]
    """For each tensor its columns, and how many of these are rotated; the first has most."""


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of latent attention from the results of products, with rotation and zeros that make them
    equally wide. Backward needs nothing of it."""

    xs: tuple[Tensor, Tensor, Tensor]
    """Queries; keys that are not rotated, with values; and the rotated part of keys."""
    ys: tuple[Tensor, Tensor, Tensor]

    @property
    def copies_queries(self) -> bool:
        """Whether queries become wider, and so are copied; otherwise they are rotated in place."""
        return self.xs[0].columns < self.ys[0].columns


@dataclass(frozen=True)
class Attention:
    """Core attention. Backward needs its inputs, and what the kernel or the written-out softmax saves."""

    queries: Tensor
    """Queries, with the keys and values that the same product makes."""
    keys_values: tuple[Tensor, ...]
    """Keys and values that are not in `queries`, nor in what a norm of keys needs."""
    y: Tensor
    heads: int
    key_value_heads: int
    head_size: int
    window: int | None
    """Number of tokens that a token attends to; None: all preceding tokens."""
    normed: bool
    """Whether queries and keys are normed before, so that values are a part of what the norm of keys needs."""
    cut: Tensor | None = None
    """A copy of the part of the result that is not from values' zeros, which the next product takes; None: there are no
    such zeros."""

    @property
    def keys(self) -> int:
        """Columns of the keys, and of the values."""
        return self.key_value_heads * self.head_size


@dataclass(frozen=True)
class Activation:
    """The activation function of an MLP, with two inputs of the product of one with the other. Backward needs them."""

    xs: tuple[Tensor, ...]
    y: Tensor


@dataclass(frozen=True)
class Experts:
    """A router, and the experts that a rank has, each an MLP with SwiGLU. Every token of the input goes to `per_token`
    of the model's experts, whose weighted results are summed."""

    x: Tensor
    y: Tensor
    router: Weight
    """[experts, h], whole on every rank."""
    shared_gate: Weight | None
    """[1, h], whole on every rank: what the shared experts' result is multiplied by."""
    weights: tuple[tuple[Weight, Weight, Weight], ...]
    """Gate, up and down of each expert that the rank has."""
    experts: int
    """Experts of the layer, on all ranks."""
    per_token: int

    @property
    def inner(self) -> int:
        """Inner width of an expert on this rank."""
        return self.weights[0][0].rows

    @property
    def all_weights(self) -> tuple[Weight, ...]:
        """Weights of the experts that the rank has, matrix by matrix, the router's and that of the shared experts'
        gate."""
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return (*(each for matrices in zip(*self.weights, strict=True) for each in matrices), self.router, *gate)


Operation = Norm | Products | Rotary | Heads | Attention | Activation | Experts


@dataclass(frozen=True)
class Block:
    """x + dropout(operations(x)), where x is the residual stream."""

    name: str
    operations: tuple[Operation, ...]
    dropout: bool
    """Whether there is dropout before the sum; backward needs its mask, one byte per element."""

    @property
    def products(self) -> tuple[Products, ...]:
        """The linear layers, in order, those with a common input together."""
        return tuple(each for each in self.operations if isinstance(each, Products))

    @property
    def ends_in_product(self) -> bool:
        """Whether nothing is between the last product and the sum, which without dropout the product computes."""
        return isinstance(self.operations[-1], Products | Experts)

    @property
    def experts(self) -> Experts | None:
        """The experts, which the operations after them, those of shared experts, are a part of; None without."""
        return next((each for each in self.operations if isinstance(each, Experts)), None)

    @property
    def mask(self) -> str:
        """Name of the dropout's mask."""
        return f"{self.name}_dropout_mask"


@dataclass(frozen=True)
class LayerTable:
    """One layer."""

    blocks: tuple[Block, ...]

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """All operations, in order."""
        return tuple(operation for block in self.blocks for operation in block.operations)

    @cached_property
    def products(self) -> tuple[Products, ...]:
        """The linear layers, in order, those with a common input together."""
        return tuple(each for block in self.blocks for each in block.products)

    @cached_property
    def adaptable(self) -> tuple[Products, ...]:
        """Linear layers that targets of `train.lora` are among, in order."""
        known = set(ADAPTED.values())
        return tuple(
            each
            for each in self.products
            if any(part.name in known for weight in each.weights for part in weight.parts)
        )

    @cached_property
    def attention(self) -> Attention:
        """Core attention."""
        return next(each for each in self.operations if isinstance(each, Attention))

    @cached_property
    def experts(self) -> Experts | None:
        """The experts, of a layer that has some."""
        return next((block.experts for block in self.blocks if block.experts), None)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All weights, those of linear layers first, then those of experts."""
        norms = tuple(each.weight for each in self.operations if isinstance(each, Norm))
        experts = () if self.experts is None else self.experts.all_weights
        return (*(weight for each in self.products for weight in each.weights), *experts, *norms)

    @cached_property
    def adapters(self) -> dict[str, int]:
        """Elements of each adapter's matrices, by their names within the layer."""
        return {name: rows * columns for each in self.products for name, (rows, columns) in each.adapters.items()}

    @cached_property
    def matrices(self) -> dict[str, int]:
        """Elements of each matrix that inputs are multiplied with, by its name within the layer: weights of linear
        layers, and adapters."""
        return {f"{each.name}.weight": each.elements for each in self.weights if not each.is_vector} | self.adapters

    @cached_property
    def dense_matrices(self) -> dict[str, int]:
        """The `matrices` that every token is multiplied with: all but those of experts."""
        return {name: size for name, size in self.matrices.items() if name not in self.of_experts}

    @cached_property
    def of_experts(self) -> frozenset[str]:
        """Names of the parameters, within the layer, that only the ranks with the same experts hold."""
        experts = () if self.experts is None else self.experts.weights
        return frozenset(f"{weight.name}.weight" for matrices in experts for weight in matrices)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Elements of each parameter by its name within the layer."""
        sizes: dict[str, int] = {}
        for each in self.weights:
            sizes[f"{each.name}.weight"] = each.elements
            if each.has_bias:
                sizes[f"{each.name}.bias"] = each.rows
        return sizes | self.adapters

    @cached_property
    def logical_matrices(self) -> dict[str, tuple[Weight, Rows]]:
        """The logical matrices and vectors of all weights by their names, each with the weight that it is a part of."""
        return {rows.name: (weight, rows) for weight in self.weights for rows in weight.parts}


def _all_rows(name: str, rows: int) -> Rows:
    return Rows(name, 0, rows, rows, 1)


def layer_table(
    model: ModelConfig,
    tensor: int = 1,
    layer: int = 0,
    lora: LoraConfig | None = None,
    expert: int = 1,
    split: int | None = None,
) -> LayerTable:
    """Layer `layer` of a model, on one of `tensor` tensor ranks, with its adapters. Of `expert` ranks that its experts
    are spread over it is the first; each expert is split over `split` tensor ranks, by default all."""
    experts = (expert, tensor if split is None else split) if model.has_experts(layer) else None
    return _layer_table(model, tensor, model.window(layer), lora, experts)


def layer_table_of(spec: JobSpec, layer: int = 0) -> LayerTable:
    """Layer `layer` of a job, on one of its tensor ranks."""
    layout = spec.layout
    return layer_table(spec.model, layout.tensor, layer, spec.train.lora, layout.expert_size, layout.expert_split)


def is_adapter(name: str) -> bool:
    """Whether a parameter is a matrix A or B of an adapter (`train.lora`)."""
    return name.endswith((".lora_a", ".lora_b"))


def lora_targets(model: ModelConfig) -> tuple[LoraTarget, ...]:
    """The targets of `train.lora` that the family has; with experts, those of attention."""
    known = layer_table(model).logical_matrices
    adapted = {target: name for target, name in ADAPTED.items() if model.moe is None or name.startswith("attention.")}
    return tuple(target for target, name in adapted.items() if name in known)


@lru_cache(maxsize=256)
def _layer_table(
    model: ModelConfig, tensor: int, window: int | None, lora: LoraConfig | None, experts: tuple[int, int] | None
) -> LayerTable:
    """`experts`: number of ranks that they are spread over, and that share each; None for a layer without."""
    mlp = _expert_mlp(model, tensor, *experts) if experts else _mlp(model, tensor, model.ffn_size)
    attend = _attention if model.latent_attention is None else _latent_attention
    blocks = attend(model, tensor, window), mlp
    if lora is None:
        return LayerTable(blocks)
    names = {ADAPTED[target] for target in lora.targets or lora_targets(model)}
    return LayerTable(tuple(_with_adapters(block, names, lora.rank) for block in blocks))


def _with_adapters(block: Block, names: set[str], rank: int) -> Block:
    def adapted(weight: Weight) -> Weight:
        parts = tuple(rows for rows in weight.parts if rows.name in names)
        return weight._replace(adapters=parts, rank=rank) if parts else weight

    operations = (
        replace(each, weights=tuple(map(adapted, each.weights))) if isinstance(each, Products) else each
        for each in block.operations
    )
    return replace(block, operations=tuple(operations))


def _norm(model: ModelConfig, block: str) -> Norm:
    x, y = (Tensor(f"{block}_norm_{end}", model.hidden_size, own=True) for end in ("input", "output"))
    rms = model.parts.rms_norm
    return Norm(f"{block}_norm", x, y._replace(recomputed_by="norm"), model.hidden_size, rms, model.bias and not rms)


def _input_weight(model: ModelConfig, name: str, rows: int, parts: tuple[Rows, ...] = (), copies: int = 1) -> Weight:
    return Weight(name, rows, model.hidden_size, model.bias, parts or (_all_rows(name, rows),), copies)


def _output(model: ModelConfig, block: str, name: str, x: Tensor) -> Products:
    h = model.hidden_size
    weight = Weight(name, h, x.columns, model.bias, (_all_rows(name, h),))
    return Products(x, (Tensor(f"{block}_output", h, own=True),), (weight,), sums=True)


def _attention(model: ModelConfig, tensor: int, window: int | None) -> Block:
    d, heads, groups = model.head_size, model.heads // tensor, max(1, model.key_value_heads // tensor)
    queries, keys, copies = heads * d, groups * d, max(1, tensor // model.key_value_heads)
    is_normed, norm = model.parts.query_key_norm, _norm(model, "attention")
    together = Tensor("queries_keys_values", queries + 2 * keys)
    apart = Tensor("queries", queries), Tensor("keys_values", 2 * keys)
    if model.key_value_heads == model.heads:
        parts = tuple(Rows(f"attention.{name}", place * d, d, 3 * d, heads) for place, name in enumerate("qkv"))
        weights: tuple[Weight, ...] = (_input_weight(model, "attention.qkv", together.columns, parts, copies),)
        ys: tuple[Tensor, ...] = (together,)
        apart = apart[0]._replace(part_of=together), apart[1]._replace(part_of=together)
        rotary = Rotary(((together.columns, queries + keys),))
    else:
        parts = tuple(Rows(f"attention.{name}", place * d, d, 2 * d, groups) for place, name in enumerate("kv"))
        of_keys_values = _input_weight(model, "attention.kv", 2 * keys, parts, copies)
        weights, ys = (_input_weight(model, "attention.q", queries), of_keys_values), apart
        rotary = Rotary(((queries, queries), (2 * keys, keys)))
    taken: tuple[Tensor, ...] = ys
    between: tuple[Operation, ...] = (rotary,) if model.parts.rotary else ()
    if is_normed:
        taken = Tensor("normed_queries", queries), Tensor("normed_keys", keys)
        between = tuple(
            operation
            for name, x, y in zip("qk", apart, taken, strict=True)
            for operation in (Norm(f"attention.{name}_norm", x, y, d, rms=True), Rotary(((y.columns, y.columns),)))
        )
    context = Tensor("context", queries)
    core = Attention(taken[0], taken[1:], context, heads, groups, d, window, is_normed)
    products = Products(norm.y, ys, weights, sums=False, projects=True)
    output = _output(model, "attention", "attention.output", context)
    return Block("attention", (norm, products, *between, core, output), model.dropout > 0)


def _latent_attention(model: ModelConfig, tensor: int, window: int | None) -> Block:
    latent, heads, norm = model.latent_attention, model.heads // tensor, _norm(model, "attention")
    assert latent is not None
    d, short = model.head_size, latent.kv_rank + latent.rope_size

    def weight(name: str, rows: int, columns: int) -> Weight:
        copies = tensor if name.endswith("_down") else 1
        return Weight(f"attention.{name}", rows, columns, model.bias, (_all_rows(f"attention.{name}", rows),), copies)

    def normed(name: str, x: Tensor, width: int) -> Norm:
        return Norm(f"attention.{name}_norm", x, Tensor(f"normed_short_{name}", width, own=True), width, rms=True)

    queries = Tensor("unpadded_queries", heads * latent.query_size)
    keys_values = Tensor("keys_values", heads * (latent.nope_size + latent.value_size))
    kv_short = Tensor("short_keys_values", short, own=True)
    kv_norm, kv_down = normed("kv", kv_short, latent.kv_rank), weight("kv_down", short, model.hidden_size)
    operations: tuple[Operation, ...]
    if latent.q_rank is None:
        q_up = weight("q_up", queries.columns, model.hidden_size)
        operations = (
            Products(norm.y, (queries,), (q_up,), sums=False),
            Products(norm.y, (kv_short,), (kv_down,), sums=False, projects=True, whole=True, shares_input=True),
        )
    else:
        q_short = Tensor("short_queries", latent.q_rank, own=True)
        q_norm, q_down = normed("q", q_short, latent.q_rank), weight("q_down", latent.q_rank, model.hidden_size)
        q_up = weight("q_up", queries.columns, latent.q_rank)
        operations = (
            Products(norm.y, (q_short, kv_short), (q_down, kv_down), sums=False, projects=True, whole=True),
            q_norm,
            Products(q_norm.y, (queries,), (q_up,), sums=False),
        )
    kv_up = Products(kv_norm.y, (keys_values,), (weight("kv_up", keys_values.columns, latent.kv_rank),), sums=False)
    ys = Tensor("queries", heads * d), Tensor("keys", heads * d), Tensor("values", heads * d)
    between = Heads((queries, keys_values, Tensor("rotated_keys", latent.rope_size, own=True)), ys)
    context = Tensor("context", heads * d)
    cut = Tensor("context_values", heads * latent.value_size) if latent.value_size < d else None
    core = Attention(ys[0], ys[1:], context, heads, heads, d, window, normed=False, cut=cut)
    output = _output(model, "attention", "attention.output", cut or context)
    return Block("attention", (norm, *operations, kv_norm, kv_up, between, core, output), model.dropout > 0)


def _mlp(model: ModelConfig, tensor: int, width: int, prefix: str = "mlp") -> Block:
    """An MLP of inner width `width`, whose weights' names begin with `prefix`."""
    inner, norm, names = width // tensor, _norm(model, "mlp"), ("gate", "up")[not model.parts.gated_mlp :]
    name = prefix.replace(".", "_")
    ys, weights = (
        [Tensor(f"{name}_{each}", inner) for each in names],
        [_input_weight(model, f"{prefix}.{each}", inner) for each in names],
    )
    active = Tensor(f"{name}_activation", inner, recomputed_by="mlp_activation")
    products = Products(norm.y, tuple(ys), tuple(weights), sums=False)
    output = _output(model, name, f"{prefix}.down", active)
    return Block("mlp", (norm, products, Activation(tuple(ys), active), output), model.dropout > 0)


def _expert_mlp(model: ModelConfig, tensor: int, expert: int, split: int) -> Block:
    """Experts, and shared experts as one MLP beside them."""
    moe, h = model.moe, model.hidden_size
    assert moe is not None
    shared = _mlp(model, tensor, moe.shared_size, "mlp.shared") if moe.shared_size else None
    norm, inner = _norm(model, "mlp"), moe.ffn_hidden_size // split

    def weight(name: str, rows: int, columns: int, copies: int = 1) -> Weight:
        return Weight(f"mlp.{name}", rows, columns, False, (_all_rows(f"mlp.{name}", rows),), copies)

    def matrices(name: str) -> tuple[Weight, Weight, Weight]:
        gate, up = (weight(f"experts.{name}.{each}", inner, h) for each in ("gate", "up"))
        return gate, up, weight(f"experts.{name}.down", h, inner)

    experts = Experts(
        norm.y,
        Tensor("mlp_experts_output", h, own=True),
        weight("router", moe.experts, h, copies=tensor),
        weight("shared_gate", 1, h, copies=tensor) if shared is not None and moe.shared_gate else None,
        tuple(matrices(str(number)) for number in range(moe.experts // expert)),
        moe.experts,
        moe.per_token,
    )
    return Block("mlp", (norm, experts, *(shared.operations[1:] if shared else ())), model.dropout > 0)
