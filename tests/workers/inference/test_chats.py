"""Answers are scored by what was said before them, and end as the template writes it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from chat_files import TEMPLATES, chat_file, said, tokenizer_folder
from engine_specs import spec

from manta.workers.data.chat_template import ChatTemplate, open_template
from manta.workers.data.tokenizer import ByteTokenizer
from manta.workers.errors import DataError
from manta.workers.inference.chats import chat, end_of_answer, question, read_conversations, template_of
from manta.workers.inference.loaded_model import TextTokens, text_tokens_of
from manta.workers.inference.tasks import InvalidTask


class Counter:
    """A model of bytes that finds token t with a log-likelihood of -t / 100 after any number of tokens, but for a
    constant."""

    device = torch.device("cpu")

    def __init__(self, longest: int = 10_000):
        self.longest, self.spec = longest, spec()

    def logits(self, tokens_bs):
        return (torch.arange(256) / -100.0).expand(*tokens_bs.shape, 256)


BYTES = TextTokens(ByteTokenizer())
CONSTANT = math.log(sum(math.exp(-t / 100) for t in range(256)))
TEMPLATE = ChatTemplate("{% for each in messages %}{{ each.role[0] ~ each.content ~ '.' }}{% endfor %}")


def conversations(tmp_path: Path, *chats):
    job = spec(data={"source": "chat", "template": "chatml"})
    return read_conversations(chat_file(tmp_path / "a.jsonl", chats), job, TEMPLATE)


def test_chat_perplexity_covers_answers_and_their_end_tokens_only(tmp_path):
    result = chat(
        Counter(),
        BYTES,
        conversations(tmp_path, said("q", "one", "q", "3"), said("x", "y"), said("?")),
    )
    expected = "aone." + "a3." + "ay."  # nothing else writes the header of an answer
    assert (result.tokens, result.conversations, result.left_out) == (len(expected), 2, 1)
    assert result.loss == pytest.approx(CONSTANT + sum(expected.encode()) / 100 / len(expected))
    assert result.perplexity == pytest.approx(math.exp(result.loss))


def test_chat_loss_is_independent_of_batch_size_and_cuts_long_conversations(tmp_path):
    chats = conversations(tmp_path, said("q", "one"), said("a longer one", "12"), said("q" * 20, "never read"))
    one, many = (chat(Counter(16), BYTES, chats, size) for size in (1, 8))
    assert one.loss == pytest.approx(many.loss)
    assert (one.tokens, one.conversations, one.left_out) == (len("aone." + "a1"), 2, 1) == (
        many.tokens, many.conversations, many.left_out,
    )  # fmt: skip
    with pytest.raises(InvalidTask, match="no answer is within the first 3 tokens"):
        chat(Counter(3), BYTES, chats)


def test_missing_conversation_file_is_named(tmp_path):
    with pytest.raises(InvalidTask, match=r"cannot be read: .*gone\.jsonl"):
        read_conversations(tmp_path / "gone.jsonl", spec(), TEMPLATE)


@pytest.mark.parametrize(("kind", "end"), [("llama 3", "<|eot_id|>"), ("qwen", "<|im_end|>"), ("mistral", "</s>")])
def test_chat_answer_ends_with_the_end_token_of_the_template(tmp_path, kind, end):
    job = spec(
        data={"source": "chat", "tokenizer": str(tokenizer_folder(tmp_path, kind)), "tokenizer_vocabulary": 420},
        model={"vocabulary_size": 420},
    )
    tokens, template = text_tokens_of(job, tmp_path / "a" / "b"), open_template(job.data)
    ending = end_of_answer(template, tokens)
    assert (ending.text, ending.token) == (end, tokens.encode(end)[0])
    assert question(template, "why?").count("why?") == 1
    assert end_of_answer(template, BYTES).token is None, "of bytes it is several"


def test_chat_question_refused_by_the_template_is_reported():
    with pytest.raises(DataError, match="makes no text of a question: no users"):
        question(ChatTemplate("{{ raise_exception('no users') }}"), "why?")


def test_chat_template_precedence_is_named_then_kept_then_spec(tmp_path):
    job, place = spec(data={"source": "chat", "template": "chatml"}), tmp_path / "checkpoints" / "step-3"
    assert template_of(job, place) == open_template(job.data)
    kept = ChatTemplate("kept", (("bos_token", "<s>"),), "there")
    (tmp_path / "chat.json").write_text(json.dumps(kept.as_document()))
    assert template_of(job, place) == kept
    (tmp_path / "mine.jinja").write_text(TEMPLATES["qwen"])
    assert template_of(job, place, str(tmp_path / "mine.jinja")).source == TEMPLATES["qwen"]
    with pytest.raises(DataError, match="the bytes tokenizer has no chat template"):
        template_of(spec(), tmp_path / "nowhere" / "b" / "c")
