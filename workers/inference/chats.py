"""Conversations with a trained model: the chat template that it was trained with, the likelihood that it gives to
answers, and what ends its own answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manta.workers.config import JobSpec
from manta.workers.data.chat_template import ChatTemplate, TemplateFailed, open_template
from manta.workers.data.documents import Text, texts_of
from manta.workers.data.shards import Section
from manta.workers.data.sources import kind_of_file
from manta.workers.data.tokenizer import CHAT_FILE, Marks
from manta.workers.errors import DataError
from manta.workers.inference.loaded_model import LoadedModel, TextTokens, folders_of_records
from manta.workers.inference.tasks import InvalidTask, exponential, marked_log_likelihood
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location


@dataclass(frozen=True)
class ChatResult:
    """How well answers are predicted, each from everything before it."""

    loss: float
    """Nats per token of the answers."""
    perplexity: float
    """e to the power of the loss."""
    tokens: int
    """Tokens of answers, including what ends them."""
    conversations: int
    """Conversations that have an answer within the model's maximum length."""
    left_out: int
    """The other conversations."""


@dataclass(frozen=True)
class End:
    """What ends an answer."""

    token: int | None
    """The token that ends an answer, if it is a single one."""
    text: str
    """The text that the template writes; may be empty."""


def template_of(spec: JobSpec, checkpoint: Location | None, named: str | None = None) -> ChatTemplate:
    """The template `named` (a file, or `chatml`), otherwise the one stored with the record of the job's corpus, beside
    its `checkpoint` if it has one, otherwise the one in its spec. Raises DataError if there is none."""
    if named is not None:
        return open_template(spec.data.model_copy(update={"template": named}))
    for folder in folders_of_records(checkpoint):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return ChatTemplate.of_document(json.loads(files_of(folder).read(folder / CHAT_FILE)))
    return open_template(spec.data)


def read_conversations(path: Path, spec: JobSpec, template: ChatTemplate) -> list[Text]:
    """The conversations of a JSONL or Parquet file. Raises InvalidTask, DataError."""
    key = spec.data.text_key if spec.data.source == "chat" else None
    own = {"source": "chat", "paths": (str(path),), "loss": "answers", "text_key": key}
    data = spec.data.model_copy(update=own)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InvalidTask(f"cannot be read: {path} ({error.strerror})") from error
    stop = -1 if kind_of_file(str(path), "chat") == "parquet" else size
    return list(texts_of(Section(str(path), 0, stop, size), data, cuts_are_exact=False, template=template))


def chat(model: LoadedModel, tokens: TextTokens, conversations: Sequence[Text], batch_size: int = 8) -> ChatResult:
    """How well the answers in `conversations` are predicted; as in training, a conversation is cut at the model's
    maximum length, and its first token is not predicted. Raises InvalidTask."""
    marked: list[tuple[list[int], Marks]] = []
    for conversation in conversations:
        ids, marks = tokens.encode_marked(conversation.text, conversation.learned or ())
        ids, marks = ids[: model.longest], marks[: model.longest]
        if marks[1:].any():
            marked.append((ids, marks))
    if not marked:
        raise InvalidTask(f"there is nothing to predict: no answer is within the first {model.longest} tokens")
    total, counted = marked_log_likelihood(model, marked, batch_size)
    loss = -total / counted
    return ChatResult(loss, exponential(loss), counted, len(marked), len(conversations) - len(marked))


def question(template: ChatTemplate, text: str) -> str:
    """The prompt for a model that is to answer a user's `text`. Raises DataError."""
    return _written(template, [{"role": "user", "content": text}], add_generation_prompt=True)


def end_of_answer(template: ChatTemplate, tokens: TextTokens) -> End:
    """What the template writes after an answer. Raises DataError."""
    message = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    written = _written(template, message)
    tail = written[written.rfind("2") + 1 :].strip()
    ids = tokens.encode(tail) if tail else []
    return End(ids[0] if len(ids) == 1 else None, tail)


def _written(template: ChatTemplate, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    try:
        return template.render(messages, None, add_generation_prompt)[0]
    except TemplateFailed as error:
        raise DataError(f"the chat template ({template.name}) makes no text of a question: {error}") from error
