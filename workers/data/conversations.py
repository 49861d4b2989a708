"""Conversations in rows, the text that a chat template makes of them, and the parts of it that are answers.

If a template has generation blocks, these are the answers. Otherwise the text is compared with those of the
conversation's beginnings: an answer begins where the messages before it end (including the answer's header), and ends
with what the template writes after its last word, such as `<|im_end|>`, except for trailing blanks.

Nothing that a row says beside its texts is dropped in silence: the template sees it, or it is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from manta.workers.data.chat_template import START, STOP, ChatTemplate, Span, TemplateFailed
from manta.workers.data.rows import kind_of
from manta.workers.errors import DataError

ANSWERER = "assistant"
_SHAREGPT_ROLES = {
    "human": "user", "gpt": ANSWERER, "chatgpt": ANSWERER, "bot": ANSWERER, "model": ANSWERER, "observation": "tool",
}  # fmt: skip
_SHAREGPT_CALL = "function_call"
"""Who speaks when the assistant calls a function."""
_SYSTEM = ("system", "system_prompt")
"""Columns for what the system says first."""
_FOR_TEMPLATE = ("tools", "documents")
"""Columns that a template may write."""
_NOT_LEARNED = (
    "functions", "image", "images", "audio", "audios", "video", "videos", "chosen", "rejected", "weight",
)  # fmt: skip
"""Columns that belong to the conversation and that nothing here can use."""
COLUMNS = (*_SYSTEM, *_FOR_TEMPLATE, *_NOT_LEARNED)
"""All columns of a row, beside the one of its messages, that must not be ignored. Others are taken for notes, such as
`id`, `source` or `score`."""
_WRITTEN = (
    "tool_calls", "function_call", "reasoning", "reasoning_content", "thinking", "refusal", "audio", "images",
)  # fmt: skip
"""Fields of a message that are part of what is said."""
_WHETHER_LEARNED = ("weight", "train")
"""Fields of a message that say whether it is learned: 0 or 1 in OpenAI's format, or a boolean."""
_NO_MESSAGES = (
    "a conversation is a list of messages; write a prompt and its answer as "
    '[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]'
)
_ELSEWHERE = "\ufdd2"
"""Stands for an answer where its place is looked for: a noncharacter of Unicode."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and who said them."""

    messages: list[dict[str, Any]]
    """Each with `role` and `content`, and other fields of the row; none if the row has none."""
    learned: tuple[bool, ...]
    """For each message whether it is an answer that is to be learned."""
    more: dict[str, list[Any] | None]
    """Values for the template, from the row: `tools` that the model may call, `documents` that it may quote."""
    where: str
    """File of the conversation and its place there, for messages."""


def conversation_in(row: Mapping[str, Any], key: str, where: str) -> Conversation:
    """The conversation of a row, whose messages are at `key`. Raises DataError."""
    if key not in row:
        there = ", ".join(map(repr, list(row)[:10])) or "none"
        what = "set data.text_key" if any(isinstance(value, list) for value in row.values()) else _NO_MESSAGES
        raise DataError(f"{where}: no key {key!r}, only {there}: {what}")
    content = [] if row[key] is None else row[key]
    if not isinstance(content, list):
        raise DataError(f"{where}: {key!r} holds {kind_of(content)}, not a list of messages")
    for name in _NOT_LEARNED:
        if name != key and row.get(name) not in (None, "", [], {}) and not (name == "weight" and row[name] == 1):
            raise DataError(f"{where}: {name!r}, beside {key!r}, cannot be used in training: leave it out of the file")
    messages, learned = [], []
    for number, each in enumerate(content, start=1):
        here = f"{where}: message {number} of {key!r}"
        message = _message(each, here)
        learned.append(_is_learned(message, here))
        messages.append(message)
    for name in _SYSTEM:
        if name != key and messages and _comes_first(row.get(name), messages[0], f"{where}: {name!r}"):
            messages.insert(0, {"role": "system", "content": row[name]})
            learned.insert(0, False)
    more = {name: None if name == key else _objects(row.get(name), f"{where}: {name!r}") for name in _FOR_TEMPLATE}
    return Conversation(messages, tuple(learned), more, where)


def as_text(conversation: Conversation, template: ChatTemplate, answers_only: bool) -> tuple[str, tuple[Span, ...]]:
    """The conversation's text, and the parts of it that are to be learned: the answers, if any, or everything. The
    template gets arguments of tool calls as objects, or, if it rejects these, as they are in the file. Raises
    DataError."""
    messages = [_with_objects(message) for message in conversation.messages]
    try:
        return _as_text(replace(conversation, messages=messages), template, answers_only)
    except DataError:
        if messages != conversation.messages:
            with suppress(DataError):
                return _as_text(conversation, template, answers_only)
        raise


def _as_text(conversation: Conversation, template: ChatTemplate, answers_only: bool) -> tuple[str, tuple[Span, ...]]:
    if not conversation.messages:
        return "", ()
    _refuse_unwritten(conversation, template)
    text, blocks = _rendered(template, conversation, len(conversation.messages))
    answers = [number for number, each in enumerate(conversation.messages) if each["role"] == ANSWERER]
    left_out = [number for number in answers if not conversation.learned[number]]
    if not answers_only:
        if left_out:
            which = f"message {left_out[0] + 1} is not to be learned (weight or train)"
            raise DataError(f"{conversation.where}: {which}, but with data.loss: all every message is")
        return text, ((0, len(text)),) if text else ()
    if not template.marks_answers:
        spans = [_answer(conversation, number, template, text) for number in answers if number not in left_out]
        return text, tuple(span for span in spans if span[0] < span[1])
    if left_out and len(blocks) != len(answers):
        raise DataError(
            f"{conversation.where}: the chat template ({template.name}) has {len(blocks)} generation blocks for "
            f"{len(answers)} answers, so nothing tells which are those that are not to be learned (weight or train)"
        )
    return text, tuple(block for at, block in enumerate(blocks) if not left_out or answers[at] not in left_out)


def _message(document: Any, where: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise DataError(f"{where} is {kind_of(document)}, not an object with 'role' and 'content'")
    message = {name: value for name, value in document.items() if value is not None}
    if "role" not in message and "from" in message:  # as ShareGPT's
        speaker = message.pop("from")
        message["role"] = _SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        if "value" in message:
            message["content"] = message.pop("value")
        if speaker == _SHAREGPT_CALL:
            message |= {"role": ANSWERER, "tool_calls": _calls(message.pop("content", None), where)}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise DataError(f"{where} has no 'role'" if role is None else f"{where}: 'role' is {kind_of(role)}, not text")
    if content is None and not message.get("tool_calls"):
        raise DataError(f"{where} ({role}) has no 'content'")
    message["content"] = "" if content is None else _text_of(content, f"{where} ({role})")
    if any(character in message["content"] for character in (START, STOP, _ELSEWHERE)):
        raise DataError(f"{where} ({role}): 'content' holds one of U+FDD0 to U+FDD2, which are not characters")
    return message


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The functions that a message of ShareGPT's calls, in OpenAI's form."""
    calls = _objects(f"[{value}]" if str(value).lstrip().startswith("{") else value, f"{where} ({_SHAREGPT_CALL})")
    if not calls or not all(isinstance(call.get("name"), str) for call in calls):
        raise DataError(f"{where} ({_SHAREGPT_CALL}): 'value' names no function")
    return [{"type": "function", "function": call} for call in calls]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have objects as arguments, which OpenAI's format has as JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    with suppress(ValueError, RecursionError):
        arguments = json.loads(function["arguments"])
        if isinstance(arguments, dict):
            return call | {"function": function | {"arguments": arguments}}
    return call


def _text_of(content: Any, where: str) -> str:
    """A message's text, which may be divided into parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: 'content' is {kind_of(content)}, not text")
    texts = []
    for number, part in enumerate(content, start=1):
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = f"of type {part.get('type')!r}" if isinstance(part, dict) else kind_of(part)
            raise DataError(f"{where}: part {number} of 'content' is {kind}, and only text is read")
        texts.append(text)
    return "".join(texts)


def _is_learned(message: dict[str, Any], where: str) -> bool:
    """Whether a message is an answer that is to be learned. Removes the fields that say so, which no template needs."""
    is_learned = message["role"] == ANSWERER
    for name in _WHETHER_LEARNED:
        value = message.pop(name, None)
        if value not in (None, 0, 1):
            raise DataError(f"{where}: {name!r} is {json.dumps(value)[:100]}, and can only be 0 or 1, false or true")
        if value and message["role"] != ANSWERER:
            raise DataError(f"{where}: {name!r} is set, but only what the {ANSWERER} says can be learned")
        is_learned = is_learned and value in (None, 1)
    return is_learned


def _comes_first(system: Any, first: Mapping[str, Any], where: str) -> bool:
    """Whether `system`, the value of a column, has to be put before the `first` message."""
    if system is None or system == "":
        return False
    if not isinstance(system, str):
        raise DataError(f"{where} holds {kind_of(system)}, not text")
    if first["role"] == "system" and first["content"] != system:
        raise DataError(f"{where} is not what the system says in the first message: leave one of them out")
    return first["role"] != "system"


def _objects(value: Any, where: str) -> list[Any] | None:
    """A list of objects, which may be written as JSON text; None if it is empty."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is a text that is not JSON ({' '.join(str(error).split())})") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise DataError(f"{where} is not a list of objects, nor JSON text of one")
    return value


def _refuse_unwritten(conversation: Conversation, template: ChatTemplate) -> None:
    """Raise DataError if a part of the conversation cannot influence its text."""
    said = [("it has", name) for name, value in conversation.more.items() if value]
    for number, message in enumerate(conversation.messages, start=1):
        said += [(f"message {number} has", name) for name in _WRITTEN if message.get(name)]
    for who, name in said:
        if name not in template.names:
            raise DataError(
                f"{conversation.where}: {who} {name!r}, which the chat template ({template.name}) does not write: use "
                "one that does (data.template), or leave it out of the file"
            )


def _rendered(
    template: ChatTemplate, conversation: Conversation, count: int, prompt: bool = False
) -> tuple[str, list[Span]]:
    """The text of the first `count` messages."""
    try:
        return template.render(conversation.messages[:count], add_generation_prompt=prompt, **conversation.more)
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
                return _span(len(before), written, own)
    else:
        # Some do not write an answer as they begin it for a model that answers, which may have to think first.
        begin, written = _from_answer_on(conversation, number, template, text, after)
        if written and before.startswith(text[:begin]) and text.startswith(written, begin) and own in written:
            return _span(begin, written, own)
    which = f"message {number + 1}"
    if own not in text:
        what = f"does not write {which} as it is in the file"
    elif is_last:
        what = f"writes {which}, or those before it, in another way than when it asks for an answer"
    else:
        what = f"writes {which} or those before it in another way once more follows"
    raise DataError(
        f"{conversation.where}: the chat template ({template.name}) {what}, so nothing tells which part of its text is "
        "the answer: use a template with {% generation %} blocks (data.template), or data.loss: all"
    )


def _span(begin: int, written: str, own: str) -> Span:
    """The part of `written` that is to be learned: an answer with what ends it."""
    behind = written[written.index(own) + len(own) :] if own else written
    blanks = len(written) - len(written.rstrip()) if behind.strip() else 0
    return begin, begin + len(written) - blanks


def _from_answer_on(
    conversation: Conversation, number: int, template: ChatTemplate, text: str, after: str
) -> tuple[int, str]:
    """First character of an answer in the conversation's `text`, and what the template writes from there on if nothing
    follows the answer, as in `after`; empty if the text before it depends on it."""
    messages = list(conversation.messages)
    messages[number] = messages[number] | {"content": _ELSEWHERE}
    other = replace(conversation, messages=messages)
    begins = []
    for known, count in ((text, len(messages)), (after, number + 1)):
        before, found, _ = _rendered(template, other, count)[0].partition(_ELSEWHERE)
        if not found or not known.startswith(before):
            return 0, ""
        begins.append(len(before))
    return begins[0], after[begins[1] :]
