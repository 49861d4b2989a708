"""A model that reads token by token says what it says of a whole text; a checkpoint of any layout is the model."""

from __future__ import annotations

import pytest
import torch
from checkpoint_programs import job, train_and_save
from engine_specs import axes, layout_of, spec
from plain_gpt import random_weights
from plain_llama import plain_model
from torch_reader import state_by_torch

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.inference.loaded_model import LoadedModel
from manta.workers.parallel.pipeline.forward_pass import KeyValueCache
from manta.workers.spec.reading import parse_job_spec

CPU = torch.device("cpu")
MODELS = [
    {"family": "gpt"},
    {"family": "gpt", "kv_heads": 2},
    {"family": "llama", "kv_heads": 1},
    {"family": "qwen", "kv_heads": 2, "head_dim": 6, "tie_embeddings": True},
    {"family": "llama", "sliding_window": 3, "full_attention_every": 2},
]


def model_with(spec, weights: dict[str, torch.Tensor]) -> LoadedModel:
    """A model with these weights, in fp64."""
    model = LoadedModel(spec, CPU)
    for shard in model.named_shards():
        shard.parameter.data = weights[shard.name].double()
    model.tie()
    return model


def both(section: dict) -> tuple[LoadedModel, torch.nn.Module]:
    """A model and the plain one, with the same weights."""
    parsed = spec(model={**section, "sequence_length": 12})
    plain = plain_model(parsed).double()
    weights = random_weights(parsed, model=plain)
    return model_with(parsed, weights), plain.load(weights)


@pytest.mark.parametrize("section", MODELS, ids=str)
def test_loaded_model_has_the_logits_of_a_plain_model(section):
    model, plain = both(section)
    tokens_bs = torch.randint(256, (3, 12))
    torch.testing.assert_close(model.logits(tokens_bs), plain(tokens_bs).float())


@pytest.mark.parametrize("section", MODELS, ids=str)
@pytest.mark.parametrize("pieces", [(12,), (5, 7), (4, 1, 1, 3, 1, 1, 1)], ids=str)
def test_loaded_model_has_the_same_logits_if_it_reads_piece_by_piece(section, pieces):
    model, plain = both(section)
    tokens_bs, cache, at = torch.randint(256, (2, 12)), KeyValueCache(12), 0
    with torch.no_grad():
        expected = plain(tokens_bs)
    for count in pieces:
        logits = model.next_logits(tokens_bs[:, at : at + count], cache)
        at += count
        torch.testing.assert_close(logits, expected[:, at - 1].float())


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_a_checkpoint_of_any_layout_is_the_model(ranks, corpus, tmp_path, layout):
    document = job(corpus, axes(layout), model={"family": "llama"})
    ranks.run(layout_of(*layout), train_and_save, document, str(tmp_path), 2)
    ((path, *_),) = complete_checkpoints(tmp_path)
    content = state_by_torch(path)
    weights = {name.removeprefix("model."): each for name, each in content.items() if name.startswith("model.")}
    model, manifest = LoadedModel.of_checkpoint(path, CPU)
    assert manifest.step == 2
    plain = plain_model(parse_job_spec(document)).load(weights)
    tokens_bs = torch.randint(257, (3, 8))
    torch.testing.assert_close(model.logits(tokens_bs), plain(tokens_bs), rtol=1e-4, atol=1e-5)
