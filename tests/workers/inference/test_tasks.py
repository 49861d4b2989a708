"""Questions are read with the line that is wrong, and answers are counted as the field counts them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from engine_specs import spec

from manta.workers.data.tokenizer import ByteTokenizer
from manta.workers.inference import tasks
from manta.workers.inference.loaded_model import TextTokens
from manta.workers.inference.tasks import InvalidTask, Question


class Alphabet:
    """A model of bytes that finds the letter after the last one 16 times as likely as any other byte."""

    spec = spec()
    longest = 64

    def logits(self, tokens_bs):
        logits = torch.zeros(*tokens_bs.shape, 256)
        return logits.scatter_(-1, (tokens_bs + 1).clamp(max=255).unsqueeze(-1), math.log(16.0))


BYTES = TextTokens(ByteTokenizer())
EXPECTED, OTHER = math.log(16 / 271), math.log(1 / 271)


def test_perplexity_is_of_all_tokens_but_each_documents_first():
    result = tasks.text(Alphabet(), BYTES, ["abc", "ax"])
    assert result.loss == pytest.approx(-(2 * EXPECTED + OTHER) / 3)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.bits_per_byte == pytest.approx(result.loss * 3 / 5 / math.log(2))
    assert result.tokens == 3


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
