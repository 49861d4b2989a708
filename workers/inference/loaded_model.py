"""A whole model on one device, with the weights of a checkpoint of any layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from workers.checkpoint.catalog import Manifest, manifest_of, while_read
from workers.checkpoint.durable import Rectangle, load
from workers.comm.comm import Comm
from workers.comm.grid import RankGrid
from workers.config import JobSpec, ParallelConfig
from workers.model.chunk import Chunk
from workers.model.parallelize import ModelStage
from workers.parallel.pipeline.forward_pass import ForwardPass
from workers.parallel.tensor.key_value_cache import KeyValueCache
from workers.parallel.tensor.shards import NamedShard
from workers.spec.reading import parse_job_spec
from workers.storage.places import Place


class LoadedModel:
    """Computes logits. Shapes: b sequences, s tokens, v vocabulary."""

    def __init__(self, spec: JobSpec, device: torch.device):
        """A model of the shape of `spec`; its weights are not set yet."""
        self.spec = spec.model_copy(update={"parallel": ParallelConfig()})
        with torch.device(device):
            self._stage = ModelStage(self.spec, Comm(RankGrid(self.spec.layout), 0, device))
        self._stage.requires_grad_(False)
        (chunk,) = self._stage.chunks
        assert isinstance(chunk, Chunk)
        self._chunk, self.device = chunk, device

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Place, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> tuple[LoadedModel, Manifest]:
        """The model that `checkpoint` holds, in `dtype`, and the checkpoint's manifest. Only the weights are read.

        Raises CheckpointError, and SpecError if this release does not understand the checkpoint's job."""
        model = cls(parse_job_spec(manifest_of(checkpoint).spec), device)
        shards = model.named_shards()
        rectangles, length = [], 0
        for shard in shards:
            rectangles.append(_whole(shard, length))
            length += shard.parameter.numel()
        with while_read(checkpoint):
            manifest, parts = load(str(checkpoint), {"model": rectangles}, {"model": length})
        for shard, rectangle in zip(shards, rectangles, strict=True):
            shard.parameter.data = rectangle.view(parts["model"]).to(device, dtype)
        model.tie()
        return model, manifest

    def named_shards(self) -> list[NamedShard]:
        """All parameters with their names, each of them whole."""
        return self._stage.named_shards()

    def tie(self) -> None:
        """Let the output layer use the token embedding's weight, if the model ties them."""
        output, embedding = self._chunk.output, self._chunk.embedding
        if self._stage.used_twice is not None and output is not None and embedding is not None:
            output.weight = embedding.token.weight

    @property
    def longest(self) -> int:
        """The maximum number of tokens in its context."""
        return self.spec.model.sequence_length

    def logits(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        """fp32 logits [b, s, v] for the token after each one."""
        return self._run(tokens_bs, ForwardPass()).float()

    def next_logits(self, tokens_bs: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """fp32 logits [b, v] for the token after these, which continue those in `cache` and are added to it."""
        logits = self._run(tokens_bs, replace(ForwardPass(), cache=cache))[:, -1].float()
        cache.advance(tokens_bs.shape[1])
        return logits

    def _run(self, tokens_bs: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        with torch.no_grad():
            logits_sbv: torch.Tensor = self._chunk(tokens_bs.to(self.device).t(), run)
        return logits_sbv.transpose(0, 1)[..., : self.spec.vocabulary_size]


def _whole(shard: NamedShard, start: int) -> Rectangle:
    """A whole parameter, stored from element `start` on."""
    shape = shard.shard.shape
    return Rectangle(shard.name, shape, (0,) * len(shape), shape, start, shape[-1])
