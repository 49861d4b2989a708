"""Conversations: reading them from rows, rendering them with a chat template, and finding the parts of the text that
are answers.

If a template has generation blocks, these are the answers. Otherwise the text is compared with those of the
conversation's beginnings: an answer begins where the messages before it end (including the answer's header), and ends
with what the template writes after its last word, such as `<|im_end|>`, except for trailing blanks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manta.workers.data.chat_template import START, STOP, ChatTemplate, Span, TemplateFailed
from manta.workers.data.rows import kind_of
from manta.workers.errors import DataError

ANSWERER = "assistant"
_SHAREGPT_ROLES = {"human": "user", "gpt": ANSWERER, "bot": ANSWERER}


@dataclass(frozen=True)
class Conversation:
    """Messages, and who said them."""

    messages: list[dict[str, Any]]
    """Each with `role` and `content`, and other fields of the row."""
    tools: list[Any] | None
    """Functions that the model may call, from the row."""
    where: str
    """File of the conversation and its place there, for messages."""


def conversation_in(row: Mapping[str, Any], key: str, where: str) -> Conversation:
    """The conversation of a row, whose messages are at `key`. Raises DataError."""
    if key not in row:
        there = ", ".join(map(repr, list(row)[:10])) or "none"
        raise DataError(f"{where}: no key {key!r}, only {there}: set data.text_key")
    content = row[key]
    if not isinstance(content, list):
        raise DataError(f"{where}: {key!r} holds {kind_of(content)}, not a list of messages")
    if not content:
        raise DataError(f"{where}: {key!r} has no messages")
    messages = [_message(each, f"{where}: message {number} of {key!r}") for number, each in enumerate(content, start=1)]
    tools = row.get("tools")
    return Conversation(messages, tools if isinstance(tools, list) and tools else None, where)


def as_text(conversation: Conversation, template: ChatTemplate, answers_only: bool) -> tuple[str, tuple[Span, ...]]:
    """The conversation's text, and the parts of it that are to be learned: the answers, if any, or everything. Raises
    DataError."""
    text, blocks = _rendered(template, conversation, len(conversation.messages))
    if not answers_only:
        return text, ((0, len(text)),) if text else ()
    if template.marks_answers:
        return text, tuple(blocks)
    spans = [
        _answer(conversation, number, template, text)
        for number, message in enumerate(conversation.messages)
        if message["role"] == ANSWERER
    ]
    return text, tuple(span for span in spans if span[0] < span[1])


def _message(document: Any, where: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise DataError(f"{where} is {kind_of(document)}, not an object with 'role' and 'content'")
    message = {name: value for name, value in document.items() if value is not None}
    if "role" not in message and "from" in message:  # as ShareGPT's
        speaker = message.pop("from")
        message["role"] = _SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        if "value" in message:
            message["content"] = message.pop("value")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise DataError(f"{where} has no 'role'" if role is None else f"{where}: 'role' is {kind_of(role)}, not text")
    if content is None and not message.get("tool_calls"):
        raise DataError(f"{where} ({role}) has no 'content'")
    if content is not None and not isinstance(content, str):
        raise DataError(f"{where} ({role}): 'content' is {kind_of(content)}, not text, and only text is read")
    message["content"] = content or ""
    if START in message["content"] or STOP in message["content"]:
        raise DataError(f"{where} ({role}): 'content' holds U+FDD0 or U+FDD1, which are not characters")
    return message


def _rendered(
    template: ChatTemplate, conversation: Conversation, count: int, prompt: bool = False
) -> tuple[str, list[Span]]:
    """The text of the first `count` messages."""
    try:
        return template.render(conversation.messages[:count], conversation.tools, prompt)
    except TemplateFailed as error:
        which = "it" if count == len(conversation.messages) else f"its first {count} messages"
        raise DataError(
            f"{conversation.where}: the chat template ({template.name}) makes no text of {which}: {error}"
        ) from error


def _answer(conversation: Conversation, number: int, template: ChatTemplate, text: str) -> Span:
    """Where message `number`, an answer, is in the conversation's `text`. Raises DataError if that is ambiguous."""
    before, _ = _rendered(template, conversation, number, prompt=True)
    is_last = number + 1 == len(conversation.messages)
    after = text if is_last else _rendered(template, conversation, number + 1)[0]
    own = conversation.messages[number]["content"].strip()
    if text.startswith(before) and after.startswith(before):
        whole = after[len(before) :]
        # Templates may omit parts of earlier answers, such as reasoning, once the conversation has continued.
        for first in range(len(whole) - len(own) + 1):
            written = whole[first:]
            if written and text.startswith(written, len(before)) and own in written:
                behind = written[written.index(own) + len(own) :] if own else written
                blanks = len(written) - len(written.rstrip()) if behind.strip() else 0
                return len(before), len(before) + len(written) - blanks
    raise DataError(
        f"{conversation.where}: the chat template ({template.name}) writes message {number + 1} or those before it in "
        "another way once more follows, so nothing tells which part of its text is the answer: use a template with "
        "{% generation %} blocks (data.template), or data.loss: all"
    )
