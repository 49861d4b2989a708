"""Models that are loaded and generate text."""

from __future__ import annotations

import itertools

import pytest
import torch
from checkpoint_programs import job, train_and_save
from engine_specs import axes, layout_of, spec
from plain_gpt import random_weights
from plain_llama import plain_model
from tokenizer_files import TEXT, byte_level, plain_tokens
from torch_reader import state_by_torch

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.errors import DataError
from manta.workers.inference.generation import PromptTooLong, Sampler, Sampling, generate
from manta.workers.inference.loaded_model import LoadedModel, text_tokens_of
from manta.workers.parallel.pipeline.forward_pass import KeyValueCache
from manta.workers.spec.reading import parse_job_spec


@pytest.fixture(scope="module")
def model():
    job = spec(model={"family": "llama", "kv_heads": 2, "sequence_length": 24})
    made = LoadedModel(job, torch.device("cpu"))
    weights = random_weights(job, spread=0.5, model=plain_model(job))
    for shard in made.named_shards():
        shard.parameter.data = weights[shard.name].float()
    return made


def written_without_a_cache(model, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(model.logits(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


PROMPTS = [[5, 17, 200], [9], [1, 2, 3, 4, 5, 6, 7], [77, 3]]


def test_greedy_generation_in_a_mixed_batch_matches_one_without_a_cache(model):
    together = generate(model, PROMPTS, 10, Sampling(), batch_size=3)
    assert [each.tokens for each in together] == [written_without_a_cache(model, each, 10) for each in PROMPTS]
    assert not any(each.ended for each in together)


def test_sampled_tokens_depend_on_seed_and_place_but_not_on_the_batch(model):
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=3)
    together = generate(model, PROMPTS, 10, sampling, batch_size=4)
    one_by_one = generate(model, PROMPTS, 10, sampling, batch_size=1)
    assert [each.tokens for each in together] == [each.tokens for each in one_by_one]
    other = generate(model, PROMPTS, 10, Sampling(temperature=1.0, top_p=0.9, seed=4))
    assert [each.tokens for each in other] != [each.tokens for each in together]


def test_generated_text_stops_before_its_end_token(model):
    free = written_without_a_cache(model, PROMPTS[0], 10)
    end = next(token for index, token in enumerate(free) if index >= 2 and token not in free[:index])
    (written, other) = generate(model, PROMPTS[:2], 10, Sampling(), end=end)
    assert (written.tokens, written.ended) == (free[: free.index(end)], True)
    assert len(other.tokens) == 10 or other.ended


def test_empty_and_too_long_prompts_are_refused(model):
    with pytest.raises(PromptTooLong, match="prompt 1 is empty"):
        generate(model, [[1], []], 5, Sampling())
    with pytest.raises(PromptTooLong, match=r"prompt 0 has 20 tokens, and with 5 more.*ask for at most 4"):
        generate(model, [[1] * 20], 5, Sampling())


LOGITS = torch.tensor([[0.0, 3.0, 2.0, -1.0, 1.0]])


def shares(sampling: Sampling, draws: int = 4000) -> torch.Tensor:
    sampler = Sampler(sampling, range(1))
    tokens = list(itertools.chain(*(sampler(LOGITS, [True]) for _ in range(draws))))
    return torch.bincount(torch.tensor(tokens), minlength=5) / draws


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0), [0, 1, 2, 3, 4]),
        (Sampling(0.5), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_k=2), [1, 2]),
        # Of 0.64, 0.24, 0.09, 0.03 and 0.01 the first two have 0.88.
        (Sampling(1.0, top_p=0.85), [1, 2]),
        (Sampling(1.0, top_p=0.9), [1, 2, 4]),
        (Sampling(1.0, top_k=2, top_p=0.1), [1]),
    ],
)
def test_sampling_draws_kept_tokens_by_their_probabilities(sampling, kept):
    expected = torch.zeros(5)
    expected[kept] = (LOGITS[0, kept] / sampling.temperature).softmax(-1)
    assert (shares(sampling) - expected).abs().max() < 0.03
    assert ((shares(sampling) > 0) <= (expected > 0)).all()


def job_with(file, **data):
    return spec(data={"tokenizer": str(file), "tokenizer_vocabulary": 400, **data})


@pytest.mark.parametrize("kept", ["checkpoints/tokenizer.json", "tokenizer.json"])
def test_the_kept_tokenizer_comes_before_the_file_that_the_spec_names(tmp_path, kept):
    """As the engine alone keeps it, and as a job of the service does."""
    (tmp_path / "checkpoints").mkdir()
    byte_level(tmp_path / kept)
    other = byte_level(tmp_path / "other.json", 300)
    tokens = text_tokens_of(job_with(other), tmp_path / "checkpoints" / "step-3")
    text = "".join(TEXT[:5])
    assert tokens.encode(text) == plain_tokens(tmp_path / kept, [text], None)
    assert tokens.decode([*tokens.encode(text), tokens.end]) == text


def test_tokenizer_without_a_kept_copy_is_the_file_of_the_spec_or_an_error(tmp_path):
    file = byte_level(tmp_path / "t.json")
    assert text_tokens_of(job_with(file), tmp_path / "checkpoints" / "step-3").end == 0
    with pytest.raises(DataError, match="the tokenizer of this job is not kept next to "):
        text_tokens_of(job_with("bpe"), tmp_path / "checkpoints" / "step-3")


def test_bytes_tokenizer_needs_no_file(tmp_path):
    assert text_tokens_of(spec(), tmp_path / "a" / "b").end is None
    ended = spec(data={"end_of_document": "<|endoftext|>"})
    assert text_tokens_of(ended, tmp_path / "a" / "b").end == 256
    assert text_tokens_of(ended, tmp_path / "a" / "b").decode([104, 105, 256]) == "hi"


CPU = torch.device("cpu")
LATENT = {"kv_rank": 10, "rope_size": 4, "nope_size": 6, "value_size": 7}
MODELS = [
    {"family": "gpt"},
    {"family": "gpt", "kv_heads": 2},
    {"family": "llama", "kv_heads": 1},
    {"family": "qwen", "kv_heads": 2, "head_dim": 6, "tie_embeddings": True},
    {"family": "llama", "sliding_window": 3, "full_attention_every": 2},
    {"family": "deepseek", "latent_attention": {"kv_rank": 10, "rope_size": 4, "nope_size": 6, "value_size": 7}},
    {
        "family": "deepseek",
        "latent_attention": {"q_rank": 9, "kv_rank": 10, "rope_size": 2, "nope_size": 3, "value_size": 9},
    },
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
