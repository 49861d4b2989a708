"""Tasks of evaluations and how answers are scored."""

from __future__ import annotations

import json
import math

import pytest
import torch
from engine_specs import spec
from hypothesis import given
from hypothesis import strategies as st
from plain_gpt import random_weights

from manta.workers.data.tokenizer import ByteTokenizer
from manta.workers.inference import tasks
from manta.workers.inference.loaded_model import LoadedModel, TextTokens
from manta.workers.inference.tasks import InvalidTask, Question, TextTooLong, _windows, score, text_log_likelihood

BYTES = TextTokens(ByteTokenizer())


class Alphabet:
    """A model of bytes that finds the letter after the last one 16 times as likely as any other byte."""

    spec = spec()
    longest = 64

    def logits(self, tokens_bs):
        logits = torch.zeros(*tokens_bs.shape, 256)
        return logits.scatter_(-1, (tokens_bs + 1).clamp(max=255).unsqueeze(-1), math.log(16.0))


EXPECTED, OTHER = math.log(16 / 271), math.log(1 / 271)


def test_perplexity_is_of_all_tokens_but_each_documents_first():
    result = tasks.text(Alphabet(), BYTES, ["abc", "ax"])
    assert result.loss == pytest.approx(-(2 * EXPECTED + OTHER) / 3)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.bits_per_byte == pytest.approx(result.loss * 3 / 5 / math.log(2))
    assert result.tokens == 3


def test_tokens_before_documents_precede_texts_passages_and_questions():
    begun = TextTokens(ByteTokenizer(), [ord("a") - 1])
    assert tasks.text(Alphabet(), begun, ["abc"]).loss == pytest.approx(-EXPECTED), "a follows what comes before it"
    assert tasks.text(Alphabet(), begun, ["abc"]).tokens == 3
    assert begun.encode(" b") == [32, 98], "which continues a text"
    assert tasks.choices(Alphabet(), begun, [Question("", ("a", "b"), 0)]).accuracy == 1.0


def test_text_task_ignores_bytes_of_documents_without_predictions():
    with_short_ones = tasks.text(Alphabet(), BYTES, ["abc", "x", "ax", "", "y"])
    assert with_short_ones == tasks.text(Alphabet(), BYTES, ["abc", "ax"])


def test_a_last_word_is_right_when_each_of_its_tokens_is_the_likeliest():
    passages = ['so \x1f !"#', "so \x1f !x", "a b"]
    result = tasks.last_word(Alphabet(), BYTES, passages)
    assert (result.accuracy, result.questions) == (pytest.approx(1 / 3), 3)
    assert result.perplexity == pytest.approx(math.exp(-(6 * EXPECTED + 3 * OTHER) / 9))


def test_choice_task_counts_the_likeliest_answer_also_by_length():
    questions = [
        Question("a", ("bcd", "x"), 0),  # three expected bytes against one other
        Question("a", ("bcdefg", "x"), 0),  # by its sum x is likelier, by length it is not
        Question("a", ("x", "b"), 0),
    ]
    result = tasks.choices(Alphabet(), BYTES, questions)
    assert 3 * EXPECTED < OTHER < EXPECTED
    assert (result.accuracy, result.by_length) == (pytest.approx(0 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b'{"question": "a"', "line 1: not JSON"),
        (b"\n[1]", "line 2: must be an object"),
        (b'{"question": "a", "choices": ["b"], "answer": 0}', "line 1: 'choices' must be a list of at least two"),
        (b'{"question": "a", "choices": ["b", 3], "answer": 0}', "line 1: each of 'choices' must be a text"),
        (
            b'{"question": "a", "choices": ["b", "c"], "answer": 2}',
            "'answer' must be the number of the right choice, 0",
        ),
        (b'{"choices": ["b", "c"], "answer": 1}', "line 1: 'question' must be a text"),
        (b"\xff", "is not UTF-8 at byte 0"),
        (
            b'{"question": "a\\ud800", "choices": ["b", "c"], "answer": 1}',
            "line 1: 'question': character 2 is half of a surrogate",
        ),
    ],
)
def test_invalid_question_file_is_reported_with_its_line(tmp_path, content, sentence):
    (tmp_path / "questions.jsonl").write_bytes(content)
    with pytest.raises(InvalidTask, match=sentence):
        tasks.read_questions(tmp_path / "questions.jsonl")


def test_text_task_reads_jsonl_lines_or_a_whole_file(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n\n" for each in ("one", "two")))
    (tmp_path / "a.txt").write_text("one\ntwo")
    assert tasks.read_texts(tmp_path / "a.jsonl") == ["one", "two"]
    assert tasks.read_texts(tmp_path / "a.txt") == ["one\ntwo"]
    with pytest.raises(InvalidTask, match=r"cannot be read: .*none\.txt"):
        tasks.read_texts(tmp_path / "none.txt")


def test_jsonl_line_ends_only_with_a_line_feed(tmp_path):
    text = "one\u2028line\x85of\u2029three"
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\r\n{}")
    with pytest.raises(InvalidTask, match="line 2: 'text' must be a text"):
        tasks.read_texts(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode())
    assert tasks.read_texts(tmp_path / "a.jsonl") == [text]


@pytest.mark.parametrize("stride", [0, -1, 65])
def test_text_task_refuses_a_stride_that_stalls_or_skips_tokens(stride):
    with pytest.raises(InvalidTask, match=f"by {stride} tokens: 1 to 64 are what the model reads at once"):
        tasks.text(Alphabet(), BYTES, ["abc" * 30], stride)


def test_tasks_refuse_a_passage_of_one_word_and_a_text_of_one_byte():
    with pytest.raises(InvalidTask, match="passage 1 has less than two words: 'word'"):
        tasks.last_word(Alphabet(), BYTES, ["word"])
    with pytest.raises(InvalidTask, match="less than two tokens"):
        tasks.text(Alphabet(), BYTES, ["a"])


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
