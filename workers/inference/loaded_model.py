"""A trained model in one process: all of it on one device, with the weights of a checkpoint of any layout, and the
conversion between texts and its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from manta.workers.checkpoint.catalog import Manifest, manifest_of, while_read
from manta.workers.checkpoint.durable import Rectangle, load
from manta.workers.checkpoint.opening import read_contents
from manta.workers.checkpoint.stored_rows import StoredRows
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import NO_TOKEN, DataConfig, JobSpec, ParallelConfig
from manta.workers.data.tokenizer import (
    FILE_NAME,
    FileTokenizer,
    Marks,
    Spans,
    Tokenizer,
    file_tokenizer,
    open_tokenizer,
    tokenizer_path,
    tokens_around,
)
from manta.workers.errors import CheckpointError, DataError, WeightsError
from manta.workers.model.stage import Chunk, ModelStage
from manta.workers.parallel.pipeline.forward_pass import ForwardPass, KeyValueCache
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.shards import NamedShard
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.submitted import with_shape_of_weights, with_vocabulary
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location
from manta.workers.weights.adapters import add, peft_adapters, stored_adapters
from manta.workers.weights.config import Keys, read_config, shape_of
from manta.workers.weights.mapping import ROUTER_BIAS

LONGEST = 4096
"""Most tokens at a time for a folder of weights, whose training is not known."""


class LoadedModel:
    """Computes logits. Shapes: b sequences, s tokens, v vocabulary."""

    def __init__(self, spec: JobSpec, device: torch.device):
        """A model of the shape of `spec`; its weights are not set yet."""
        train = spec.train.model_copy(update={"lora": None})
        self.spec = spec.model_copy(update={"parallel": ParallelConfig(), "train": train})
        with torch.device(device):
            self._stage = ModelStage(self.spec, Comm(RankGrid(self.spec.layout), 0, device))
        self._stage.requires_grad_(False)
        (chunk,) = self._stage.chunks
        assert isinstance(chunk, Chunk)
        self._chunk, self.device = chunk, device

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Location,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        adapter: Path | None = None,
    ) -> tuple[LoadedModel, Manifest]:
        """The model that `checkpoint` holds, in `dtype`, and the checkpoint's manifest. Only the weights are read.
        Adapters, its own or those in the folder `adapter`, are merged into them in fp32.

        Raises CheckpointError, WeightsError if an adapter does not fit, and SpecError if this release does not
        understand the checkpoint's job."""
        spec = parse_job_spec(manifest_of(checkpoint).spec)
        if adapter is not None and spec.train.lora is not None:
            raise WeightsError(
                f"{checkpoint} has adapters of its own: leave out --adapter, or name the weights that they are beside"
            )
        model = cls(spec, device)
        shards = model.named_shards()
        rectangles, length = [], 0
        for shard in shards:
            shape = shard.shard.shape  # whole, stored from element `length` on
            rectangles.append(Rectangle(shard.name, shape, (0,) * len(shape), shape, length, shape[-1]))
            length += shard.parameter.numel()
        with while_read(checkpoint):
            manifest, parts = load(str(checkpoint), {"model": rectangles}, {"model": length})
            with StoredRows(checkpoint, manifest, read_contents(checkpoint, manifest)) as rows:
                merger = stored_adapters(spec, rows) if adapter is None else peft_adapters(adapter, spec.model)
                for shard, rectangle in zip(shards, rectangles, strict=True):
                    values = rectangle.view(parts["model"])
                    add(merger.adapters_of(shard.name), 0, values.numpy())
                    shard.parameter.data = values.to(device, dtype)
        model.tie()
        if (biases_le := model._stage.router_biases) is not None:
            biases = manifest.small.get(ROUTER_BIAS, [])
            if len(biases) != biases_le.numel():
                raise CheckpointError(f"the checkpoint at {checkpoint} has no {ROUTER_BIAS} of this model's experts")
            biases_le.copy_(torch.tensor(biases).view_as(biases_le))
        return model, manifest

    @classmethod
    def of_weights(
        cls, spec: JobSpec, device: torch.device, dtype: torch.dtype = torch.float32, adapter: Path | None = None
    ) -> LoadedModel:
        """The model that a job begins with (`model.from`), in `dtype`; adapters in the folder `adapter` are merged into
        its weights in fp32. Raises WeightsError."""
        from manta.workers.weights.reading import Weights  # only these need safetensors

        model, weights = cls(spec, device), Weights(spec)
        merger = None if adapter is None else peft_adapters(adapter, spec.model)
        for shard in model.named_shards():
            values = torch.empty(shard.parameter.shape)
            weights.fill(shard, values)
            add(merger.adapters_of(shard.name) if merger is not None else (), 0, values.numpy())
            shard.parameter.data = values.to(device, dtype)
        model.tie()
        if model._stage.router_biases is not None:
            weights.fill_router_bias(model._stage.router_biases)
        return model

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
        return self._run(tokens_bs, ForwardPass(Positions.of(tokens_bs.shape[1]))).float()

    def next_logits(self, tokens_bs: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """fp32 logits [b, v] for the token after these, which continue those in `cache` and are added to it."""
        count = tokens_bs.shape[1]
        logits = self._run(tokens_bs, ForwardPass(Positions.of(count, cache.first), cache=cache))[:, -1].float()
        cache.advance(count)
        return logits

    def _run(self, tokens_bs: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        with torch.no_grad():
            logits_sbv: torch.Tensor = self._chunk(tokens_bs.to(self.device).t(), run)
        return logits_sbv.transpose(0, 1)[..., : self.spec.vocabulary_size]


def spec_of_weights(folder: Path) -> JobSpec:
    """What a job would say that began with a folder of Hugging Face weights, and its tokenizer. Raises WeightsError,
    DataError, SpecError."""
    config = read_config(folder)
    length = min(shape_of(config).positions, LONGEST)
    data = {
        "source": "text",
        "paths": [str(folder)],
        "tokenizer": str(folder),
        "end_of_document": _end_in(config, folder),
    }
    model = {"from": str(folder), "sequence_length": length}
    document = {"model": model, "data": data, "train": {"steps": 1, "global_batch_size": 1}}
    return with_vocabulary(parse_job_spec(with_shape_of_weights(document)))


def _end_in(config: Keys, folder: Path) -> str | None:
    """`data.end_of_document` for the tokenizer in `folder`: null if it has a usual one; otherwise the token with which
    the model ends what it writes, if any. Raises DataError."""
    tokenizer = FileTokenizer(tokenizer_path(folder), needs_end=False)
    end = config.get("eos_token_id")
    if tokenizer.end_of_document is not None:
        return None
    return tokenizer.text_of(end) if isinstance(end, int) and end in range(tokenizer.vocabulary) else NO_TOKEN


class TextTokens:
    """A tokenizer for single texts, in both directions."""

    def __init__(self, tokenizer: Tokenizer, begin: Sequence[int] = ()):
        """`begin`: tokens before each document."""
        self._tokenizer, self._begin, self.end = tokenizer, begin, tokenizer.end_of_document
        """The token that ends a document; None if there is none."""

    def encode(self, text: str, begins: bool = False) -> list[int]:
        """Token ids of a text, without an end token. `begins`: whether a document begins with it."""
        return [*(self._begin if begins else ()), *self._tokenizer.encode([text])[0]]

    def encode_marked(self, text: str, spans: Spans) -> tuple[list[int], Marks]:
        """Token ids of a text, and which of them contain a character of its `spans`."""
        ((ids, marks),) = self._tokenizer.encode_marked([text], [spans])
        return list(ids), marks

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(tokens)


def text_tokens_of(spec: JobSpec, checkpoint: Location | None) -> TextTokens:
    """The tokenizer that a job was trained with: the one stored with the record of its corpus, beside its `checkpoint`
    if it has one, otherwise the file that its spec names. Raises DataError if there is none."""
    data = spec.data
    if data.tokenizer == "bytes" and data.source != "megatron":
        return TextTokens(open_tokenizer(data))
    for folder in folders_of_records(checkpoint):
        with contextlib.suppress(OSError):
            content = files_of(folder).read(folder / FILE_NAME)
            return _of_file(data, str(folder / FILE_NAME), content)
    if data.tokenizer_file is None:
        raise DataError(f"the tokenizer of this job is not kept next to {checkpoint}: there is no {FILE_NAME}")
    return _of_file(data, tokenizer_path(data.tokenizer_file))


def folders_of_records(checkpoint: Location | None) -> tuple[Location, ...]:
    """Where the records of a job's corpus may be: of the engine alone, and of a job of the service."""
    return () if checkpoint is None else (checkpoint.parent, checkpoint.parent.parent)


def _of_file(data: DataConfig, path: str | Path, content: bytes | None = None) -> TextTokens:
    tokenizer = file_tokenizer(data, path, content)
    return TextTokens(tokenizer, tokens_around(data, tokenizer)[0])
