"""What is written depends on the prompt and the seed alone, and ends where it should."""

from __future__ import annotations

import itertools

import pytest
import torch
from engine_specs import spec
from plain_gpt import random_weights
from plain_llama import plain_model

from manta.workers.inference.generation import PromptTooLong, Sampler, Sampling, generate
from manta.workers.inference.loaded_model import LoadedModel


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
