"""Transforms a model for parallel training: the parts that a rank holds, tied weights, compilation. Recomputation
differs between micro-batches, so the pipeline passes it with each forward (`ForwardPass.recompute`;
workers/parallel/recompute)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from workers.comm.comm import Comm
from workers.config import JobSpec
from workers.model.chunk import Chunk
from workers.model.shared import Shared
from workers.parallel.pipeline.stages import virtual_stage
from workers.parallel.tensor import compiled_operators
from workers.parallel.tensor.fp8_products import Fp8Products
from workers.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from workers.parallel.tensor.products import Products, TorchProducts
from workers.parallel.tensor.region import Region
from workers.parallel.tensor.shards import NamedShard, named_shards
from workers.spec.parameters import TOKEN_EMBEDDING, frozen_names


class ModelStage(nn.Module):
    """All virtual stages of a rank; parameter names are those of the whole model."""

    def __init__(self, spec: JobSpec, comm: Comm, products: Products | None = None):
        """`products` computes the linear layers; default: torch."""
        super().__init__()
        layout = spec.layout
        region = Region(comm, layout.sequence_parallel_on, products or TorchProducts(), layout.forward_chunks)
        self.weight_gradients, self._products = region.weight_gradients, region.products
        shared, count = Shared(spec, region), layout.pipeline * layout.virtual_stages
        indices = [
            virtual_stage(layout.schedule, layout.pipeline, layout.virtual_stages, comm.index("pipeline"), chunk)
            for chunk in range(layout.virtual_stages)
        ]
        chunks = [Chunk(shared, index, count) for index in indices]
        self.chunks = nn.ModuleList(chunks)
        self.used_twice = tie_embeddings(chunks) if spec.model.tie_embeddings else None
        """The token embedding's weight on this rank, if the output layer uses it too."""
        frozen = frozen_names(spec)
        for entry in self.named_shards():
            entry.parameter.requires_grad_(entry.name not in frozen)

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
    has a copy, whose gradients are summed once per step (workers/parallel/data/shared_gradients.py).
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
            output.shards["weight"],
            tied_across_stages=True,
            shared_copy=True,
            name=TOKEN_EMBEDDING,
            group="embedding",
        )
    return None


def wait_before_parts(stage: ModelStage, wait_for: Callable[[nn.Module], object]) -> None:
    """Have `wait_for` called with each part of the stage's chunks before it computes."""
    for chunk in stage.chunks:
        assert isinstance(chunk, Chunk)
        chunk.before = wait_for


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
    """Compile each layer as a separate block; equal ones share the result. Parameters must not be moved from then
    on."""
    # Training and evaluation, full and smaller micro-batches, recomputed or not: each is a separate variant.
    torch._dynamo.config.recompile_limit = 32
    for _, module in linear_layers(stage):
        compiled_operators.enter(module)
    for chunk in stage.chunks:
        assert isinstance(chunk, Chunk)
        for layer in chunk.layers.values():
            layer.compile(backend=backend)
