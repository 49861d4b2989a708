"""Log-likelihoods are sums of the model's own, each token of a text once."""

from __future__ import annotations

import pytest
import torch
from engine_specs import spec
from hypothesis import given
from hypothesis import strategies as st
from plain_gpt import random_weights

from manta.workers.inference.loaded_model import LoadedModel
from manta.workers.inference.tasks import TextTooLong, _windows, score, text_log_likelihood

LENGTH = 8


@pytest.fixture(scope="module")
def model():
    job = spec(model={"sequence_length": LENGTH})
    made = LoadedModel(job, torch.device("cpu"))
    weights = random_weights(job, spread=0.5)
    for shard in made.named_shards():
        shard.parameter.data = weights[shard.name].float()
    made.tie()
    return made


def alone(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    text = [*context, *continuation]
    logs = model.logits(torch.tensor([text[:-1]])).log_softmax(-1)[0]
    first = max(len(context) - 1, 0)
    wanted = text[first + 1 :]
    return (
        sum(logs[first + at, token].item() for at, token in enumerate(wanted)),
        logs[first:].argmax(-1).tolist() == wanted,
    )


def test_scores_of_pairs_are_independent_of_the_batch(model):
    greedy = int(model.logits(torch.tensor([[7, 8]]))[0, -1].argmax())
    pairs = [([1, 2, 3], [4, 5]), ([9], [200]), ([7, 8], [greedy]), ([], [1, 2, 3]), ([5] * 6, [1, 2])]
    for batch_size in (1, 2, 8):
        for scored, (context, continuation) in zip(score(model, pairs, batch_size), pairs, strict=True):
            expected, is_greedy = alone(model, context, continuation)
            assert scored.log_likelihood == pytest.approx(expected, rel=1e-4)
            assert scored.is_greedy == is_greedy
            assert scored.tokens == len(continuation) - (0 if context else 1)


def test_scoring_cuts_a_long_context_and_refuses_a_long_continuation(model):
    long = list(range(20))
    (scored,) = score(model, [(long, [3])])
    assert scored.log_likelihood == pytest.approx(alone(model, long[-LENGTH:], [3])[0], rel=1e-4)
    with pytest.raises(TextTooLong, match="continuation 0 has 9 tokens, more than the 8"):
        score(model, [([1], [0] * 9)])


def test_a_text_of_one_window_is_a_continuation_of_its_first_token(model):
    text = [3, 1, 4, 1, 5, 9, 2]
    total, tokens = text_log_likelihood(model, text)
    assert (total, tokens) == (pytest.approx(alone(model, text[:1], text[1:])[0], rel=1e-4), 6)


def test_scoring_windows_do_not_overlap_by_default(model):
    text = list(range(3 * LENGTH))
    usual = text_log_likelihood(model, text)
    assert usual == text_log_likelihood(model, text, LENGTH)
    assert usual[0] != text_log_likelihood(model, text, LENGTH // 2)[0]


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 9))
def test_scoring_windows_score_each_token_once_with_the_longest_context(length, longest, stride):
    stride = min(stride, longest)
    windows = list(_windows(length, longest, stride))
    assert [at for _, begin, end in windows for at in range(begin, end)] == list(range(1, length))
    for context, begin, end in windows:
        assert context < begin and end - context <= longest + 1
        assert context == 0 or end - context == longest + 1
