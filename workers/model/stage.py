"""A rank's stage of the model: its virtual stages, and what parallel training does to them (tied weights, compilation,
8 bits). Recomputation differs between micro-batches, so the pipeline passes it with each forward
(`ForwardPass.recompute`; workers/parallel/recompute).

Shapes: s sequence, b micro-batch, h hidden, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.model.families import parts_of
from manta.workers.model.shared import INIT_STD, Shared
from manta.workers.parallel.experts.layer import ExpertMLP
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute.modules import checkpointed
from manta.workers.parallel.recompute.offload import OffloadedPass, memory_of
from manta.workers.parallel.tensor import compiled_operators
from manta.workers.parallel.tensor.fp8 import Fp8Products
from manta.workers.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabularyParallelOutput
from manta.workers.parallel.tensor.products import Products, TorchProducts
from manta.workers.parallel.tensor.sequence_parallel import Region
from manta.workers.parallel.tensor.shards import NamedShard, named_shards
from manta.workers.schedules.stages import layers_of, stages_of_rank
from manta.workers.spec.parameters import TOKEN_EMBEDDING, frozen_names


class Chunk(nn.Module):
    """One virtual stage: some layers in a row; the first has the embedding too, the last final norm and output."""

    def __init__(self, shared: Shared, index: int, count: int):
        """Virtual stage `index` of `count`, in model order."""
        super().__init__()
        spec, model, region = shared.spec, shared.spec.model, shared.region
        parts = parts_of(model)
        self.shared, self.region, self.index = shared, region, index
        self.is_first, self.is_last = index == 0, index == count - 1
        # So the order of tokens concerns no other rank.
        self.has_full_sequence = count == 1 and region.tensor_size == 1 and shared.across is None
        self.before: list[Callable[[nn.Module], object]] = []
        """Called with each part before it computes: its parameters may not have arrived yet."""
        self.after: Callable[[nn.Module, torch.Tensor], object] = lambda part, y: None
        """Called with each part but the output layer, and with what it has computed."""
        self._stays: frozenset[int] | None = None
        """Memory that is not an activation, once it is known."""
        self.embedding = parts.embedding(shared) if self.is_first else None
        indices = layers_of(model.layers, spec.layout, index)
        self.layers = nn.ModuleDict({str(i): parts.layer(shared, i) for i in indices})
        self.final_norm = parts.norm(model) if self.is_last else None
        self.output: VocabularyParallelOutput | None = None
        if self.is_last:
            by_parts = spec.train.head_tokens > 0
            self.output = VocabularyParallelOutput(model.hidden_size, spec.vocabulary_size, region, INIT_STD, by_parts)

    def forward(self, x: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """Tokens [s, b] in the first virtual stage, otherwise [s or s/t, b, h]. Returns logits [s, b, v/t] in the last
        one, or the input of the output layer, perhaps as a view of [b, s, v]; otherwise [s or s/t, b, h]."""
        if self.has_full_sequence and run.keys_b is None:
            run = replace(run, batch_first=True)
            x = x.t().contiguous()
        if self.embedding is not None:
            self._begin(self.embedding)
            x = self.embedding(x, run)
            self.after(self.embedding, x)
        self.shared.prepare(x, run.positions)
        offloading = self._offloading()
        for name, layer in self.layers.items():
            self._begin(layer)
            x = _gradient_begins(x, layer)
            part = partial(self._layer, name, layer, run)
            x = part(x) if offloading is None else offloading.run(part, x)
            self.after(layer, x)
        if offloading is not None:
            offloading.end()
        if run.cache is not None:
            x = x[:, -1:]
        if self.final_norm is not None and self.output is not None:
            self._begin(self.final_norm, self.output)
            x = self.final_norm(x)
            if run.logits:
                x = self.output(_gradient_begins(x, self.output))
        return x.transpose(0, 1) if run.batch_first else x

    def _begin(self, *parts: nn.Module) -> None:
        for part in parts:
            for call in self.before:
                call(part)

    def _layer(self, name: str, layer: nn.Module, run: ForwardPass, x: torch.Tensor) -> torch.Tensor:
        is_full = run.recompute.full_layer(int(name))
        result: torch.Tensor = checkpointed(self.region.comm, layer, x, run) if is_full else layer(x, run)
        return result

    def _offloading(self) -> OffloadedPass | None:
        """Offloads activations to the host, if the job asks for it."""
        count = self.shared.spec.layout.offload_layers
        if not count or not torch.is_grad_enabled():
            return None
        if self._stays is None:
            self._stays = frozenset(memory_of(each) for each in (*self.parameters(), *self.shared.all_tables()))
        return OffloadedPass(len(self.layers), count, self.shared.host_blocks, self._stays)


def _gradient_begins(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """The module's input. It requires a gradient if something in the module is trained, even if nothing before it is:
    the module's products only have a gradient if their input has one (workers/parallel/tensor/linear_autograd.py)."""
    if (
        not torch.is_grad_enabled()
        or x.requires_grad
        or not any(parameter.requires_grad for parameter in module.parameters())
    ):
        return x
    return x.detach().requires_grad_()


class ModelStage(nn.Module):
    """All virtual stages of a rank; parameter names are those of the whole model."""

    def __init__(self, spec: JobSpec, comm: Comm, products: Products | None = None):
        """`products` computes the linear layers; default: torch."""
        super().__init__()
        layout = spec.layout
        region = Region(comm, layout.sequence_parallel_on, products or TorchProducts(), layout.forward_chunks)
        self.weight_gradients, self._products = region.weight_gradients, region.products
        shared, count = Shared(spec, region), layout.pipeline * layout.virtual_stages
        self.router_biases = shared.router_biases
        """What steps move of the choice of experts (`Shared.router_biases`)."""
        shape = layout.schedule, layout.pipeline, layout.virtual_stages
        indices = stages_of_rank(*shape, comm.index("pipeline"))
        chunks = [Chunk(shared, index, count) for index in indices]
        self.chunks = nn.ModuleList(chunks)
        self.used_twice = tie_embeddings(chunks) if spec.model.tie_embeddings else None
        """The token embedding's weight on this rank, if the output layer uses it too."""
        self.compiled = False
        """Whether layers are compiled, so that their products look for their layer (`compiled_operators.py`)."""
        frozen = frozen_names(spec)
        for entry in self.named_shards():
            entry.parameter.requires_grad_(entry.name not in frozen)
        for experts in (each for each in self.modules() if isinstance(each, ExpertMLP)):
            experts.know_frozen(frozen)

    def begin(self) -> None:
        """A step or an evaluation begins; its weights may differ from those of the last one."""
        self._products.begin()

    @property
    def reads_tokens(self) -> bool:
        """Whether the rank needs the text: it embeds tokens or computes the loss."""
        return any(chunk.is_first or chunk.is_last for chunk in self.chunks)

    def named_shards(self) -> list[NamedShard]:
        """This rank's parameters by their names in the whole model."""
        return [shard for chunk in self.chunks for shard in named_shards(chunk)]


def tie_embeddings(chunks: Sequence[Chunk]) -> nn.Parameter | None:
    """Make the output layer use the token embedding's weight (arXiv:1909.08053, section 3).

    If a rank's `chunks` contain both ends of the model, they share one parameter, which is returned. Otherwise each end
    has a copy, whose gradients are summed once per step (workers/parallel/data/reduction.py).
    """
    embedding = next((chunk.embedding.token for chunk in chunks if chunk.embedding is not None), None)
    output = next((chunk.output for chunk in chunks if chunk.output is not None), None)
    if embedding is not None and output is not None:
        output.weight = embedding.weight
        output.shards.clear()
        return embedding.weight
    if embedding is not None:
        embedding.shards["weight"] = replace(embedding.shards["weight"], tied_across_stages=True)
    if output is not None:
        output.shards["weight"] = replace(
            output.shards["weight"], tied_across_stages=True, shared_copy=True, name=TOKEN_EMBEDDING, group="embedding"
        )
    return None


def wait_before_parts(stage: ModelStage, wait_for: Callable[[nn.Module], object]) -> None:
    """Have `wait_for` called with each part of the stage's chunks before it computes."""
    for chunk in stage.chunks:
        assert isinstance(chunk, Chunk)
        chunk.before.append(wait_for)


def call_around_parts(
    stage: ModelStage, before: Callable[[nn.Module], object], after: Callable[[nn.Module, torch.Tensor], object]
) -> None:
    """Have `before` called with each part of the stage's chunks before it computes, and `after` with its result."""
    wait_before_parts(stage, before)
    for chunk in stage.chunks:
        assert isinstance(chunk, Chunk)
        chunk.after = after


def parts_in_order(stage: ModelStage) -> list[nn.Module]:
    """What a stage that is the whole model computes one after the other: embedding, layers, output layer."""
    (chunk,) = stage.chunks
    assert isinstance(chunk, Chunk) and chunk.embedding is not None and chunk.output is not None
    return [chunk.embedding, *chunk.layers.values(), chunk.output]


def compute_in_fp8(stage: ModelStage, products: Fp8Products) -> None:
    """Have `products` compute the linear layers of transformer layers in 8 bits. Parameters must not be moved from then
    on. Raises ModelError for unsuitable widths."""
    for name, module in linear_layers(stage):
        products.take(f"{name}.weight", module.weight)


def linear_layers(stage: ModelStage) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
    """The linear layers within the stage's transformer layers, with their names there."""
    for chunk in stage.chunks:
        assert isinstance(chunk, Chunk)
        for name, module in chunk.layers.named_modules(prefix="layers"):
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                yield name, module


def compile_layers(stage: ModelStage, backend: str = "inductor") -> None:
    """Compile each layer by itself; equal ones share the result. Parameters must not be moved from then on."""
    # Training and evaluation, full and smaller micro-batches, recomputed or not: each is a separate variant.
    torch._dynamo.config.recompile_limit = 32
    stage.compiled = True
    for _, module in linear_layers(stage):
        compiled_operators.enter(module)
    for shared in {chunk.shared for chunk in stage.chunks if isinstance(chunk, Chunk)}:
        if shared.across is not None:
            shared.across.stay_out(torch.compiler.disable)
    for chunk in stage.chunks:
        assert isinstance(chunk, Chunk)
        for experts in (each for each in chunk.modules() if isinstance(each, ExpertMLP)):
            # How many rows an expert has differs between micro-batches.
            experts.forward = torch.compiler.disable(experts.forward)  # type: ignore[method-assign]
        for layer in chunk.layers.values():
            layer.compile(backend=backend)
