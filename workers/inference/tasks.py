"""The tasks for evaluating a model, and the log-likelihoods that it gives to texts, which they compare: how well it
predicts a text, the last word of a passage, or the right one of several answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manta.workers.data.tokenizer import Marks
from manta.workers.errors import MantaError
from manta.workers.inference.loaded_model import LoadedModel, TextTokens
from manta.workers.system.regular_files import read_regular

_MAX_BYTES = 2**30
"""Maximum size of a file of questions or texts, which is read as a whole."""


class InvalidTask(MantaError):
    """A file of questions is invalid."""


@dataclass(frozen=True)
class TextResult:
    """How well a text is predicted."""

    loss: float
    """Nats per token."""
    perplexity: float
    """e to the power of the loss."""
    bits_per_byte: float
    """Bits per byte of the text's UTF-8, which does not depend on the tokenizer."""
    tokens: int
    """Predicted tokens: all except the first of each document."""


@dataclass(frozen=True)
class Accuracy:
    """How many questions were answered correctly."""

    accuracy: float
    questions: int
    by_length: float | None = None
    """For a choice between answers: the same with an answer's log-likelihood divided by its bytes."""
    perplexity: float | None = None
    """For last words: per token."""


def text(
    model: LoadedModel, tokens: TextTokens, documents: Sequence[str], stride: int | None = None, batch_size: int = 8
) -> TextResult:
    """How well each document is predicted, in windows at a distance of `stride` tokens. Raises InvalidTask."""
    if stride is not None and not 0 < stride <= model.longest:
        raise InvalidTask(
            f"windows cannot move on by {stride} tokens: 1 to {model.longest} are what the model reads at once"
        )
    total, counted, size = 0.0, 0, 0
    for document in documents:
        ids = tokens.encode(document, begins=True)
        log_likelihood, count = text_log_likelihood(model, ids, stride, batch_size)
        if count:  # in a document of one token nothing is predicted, so its bytes do not count
            total, counted, size = total + log_likelihood, counted + count, size + len(document.encode())
    if not counted:
        raise InvalidTask("there is nothing to predict: the text has less than two tokens")
    loss = -total / counted
    return TextResult(loss, exponential(loss), -total / math.log(2) / size, counted)


def last_word(model: LoadedModel, tokens: TextTokens, passages: Sequence[str], batch_size: int = 8) -> Accuracy:
    """How often the last word of a passage is the most likely, as in LAMBADA (arXiv:1606.06031). Raises InvalidTask."""
    pairs = []
    for number, passage in enumerate(passages, start=1):
        before, space, word = passage.rstrip().rpartition(" ")
        if not before or not word:
            raise InvalidTask(f"passage {number} has less than two words: {passage[:60]!r}")
        pairs.append((tokens.encode(before, begins=True), tokens.encode(space + word)))
    scores = score(model, pairs, batch_size)
    loss = -sum(each.log_likelihood for each in scores) / sum(each.tokens for each in scores)
    right = sum(each.is_greedy for each in scores)
    return Accuracy(right / len(scores), len(scores), perplexity=exponential(loss))


@dataclass(frozen=True)
class Question:
    """A question with several answers."""

    text: str
    choices: tuple[str, ...]
    answer: int
    """Number of the right answer, from 0."""


def choices(model: LoadedModel, tokens: TextTokens, questions: Sequence[Question], batch_size: int = 8) -> Accuracy:
    """How often the right answer is the most likely one after its question."""
    pairs = [
        (tokens.encode(each.text, begins=True), tokens.encode(choice)) for each in questions for choice in each.choices
    ]
    scores = iter(score(model, pairs, batch_size))
    right = right_by_length = 0
    for question in questions:
        likelihoods = [next(scores).log_likelihood for _ in question.choices]
        shares = [value / len(choice.encode()) for value, choice in zip(likelihoods, question.choices, strict=True)]
        right += likelihoods.index(max(likelihoods)) == question.answer
        right_by_length += shares.index(max(shares)) == question.answer
    return Accuracy(right / len(questions), len(questions), by_length=right_by_length / len(questions))


def read_texts(path: Path) -> list[str]:
    """The documents of a file: of JSONL the `text` of each line, otherwise the whole content. Raises InvalidTask."""
    if path.suffix != ".jsonl":
        return [_content(path)]
    return [_string(each.get("text"), f"{path}, line {line}: 'text'") for line, each in _lines(path)]


def read_questions(path: Path) -> list[Question]:
    """Lines of JSON with `question`, `choices` and `answer`. Raises InvalidTask."""
    questions = []
    for line, each in _lines(path):
        where = f"{path}, line {line}"
        given, answer = each.get("choices"), each.get("answer")
        if not isinstance(given, list) or len(given) < 2:
            raise InvalidTask(f"{where}: 'choices' must be a list of at least two texts")
        texts = tuple(_string(choice, f"{where}: each of 'choices'") for choice in given)
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(texts):
            raise InvalidTask(f"{where}: 'answer' must be the number of the right choice, 0 to {len(texts) - 1}")
        questions.append(Question(_string(each.get("question"), f"{where}: 'question'"), texts, answer))
    return questions


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    # Split at line feeds only: `splitlines` also splits at characters that a text may contain in JSON, such as U+2028.
    lines = [(number, line) for number, line in enumerate(_content(path).split("\n"), start=1) if line.strip()]
    if not lines:
        raise InvalidTask(f"{path} is empty")
    for number, line in lines:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InvalidTask(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise InvalidTask(f"{path}, line {number}: must be an object in braces")
        yield number, value


def _content(path: Path) -> str:
    try:
        return read_regular(path, _MAX_BYTES).decode()
    except OSError as error:
        raise InvalidTask(f"cannot be read: {path} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidTask(f"{path} is not UTF-8 at byte {error.start}") from error


def _string(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidTask(f"{what} must be a text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidTask(f"{what}: character {error.start + 1} is half of a surrogate pair") from error
    return value


def exponential(value: float) -> float:
    """e to the power of `value`; infinite if it exceeds fp64."""
    return math.exp(value) if value < 700 else math.inf


class TextTooLong(MantaError):
    """A text that has to be scored as a whole does not fit into the model."""


@dataclass(frozen=True)
class Score:
    """The score of a continuation."""

    log_likelihood: float
    """Sum over its tokens, in nats."""
    is_greedy: bool
    """Whether each of its tokens is the most likely one after the preceding ones."""
    tokens: int
    """Number of its tokens."""


def score(model: LoadedModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int = 8) -> list[Score]:
    """The score of each (context, continuation); of a context that is too long the end is used. A continuation without
    a context is scored from its second token on, since nothing precedes the first. Raises TextTooLong."""
    for number, (_, continuation) in enumerate(pairs):
        if len(continuation) > model.longest:
            raise TextTooLong(
                f"continuation {number} has {len(continuation)} tokens, more than the {model.longest} that the model "
                "reads at once"
            )
    results: dict[int, Score] = {}
    # Texts of similar length are batched: the shorter ones are padded at the end, which no earlier token attends to.
    order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        for number, each in zip(numbers, _scores(model, [pairs[number] for number in numbers]), strict=True):
            results[number] = each
    return [results[number] for number in range(len(pairs))]


def _scores(model: LoadedModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[Score]:
    texts = [[*context, *continuation][-model.longest - 1 :] for context, continuation in pairs]
    length = max(2, *map(len, texts)) - 1
    tokens_bs = torch.tensor([[*text[:-1], *[0] * (length + 1 - len(text))][:length] for text in texts])
    logs_bsv = model.logits(tokens_bs).log_softmax(-1)
    for text, (_, continuation), logs_sv in zip(texts, pairs, logs_bsv, strict=True):
        scored = min(len(continuation), len(text) - 1)
        if scored <= 0:
            yield Score(0.0, is_greedy=True, tokens=0)
            continue
        logs = logs_sv[len(text) - 1 - scored : len(text) - 1]
        wanted = torch.tensor(text[-scored:], device=logs.device)
        log_likelihood = logs.gather(-1, wanted.unsqueeze(-1)).double().sum().item()
        yield Score(log_likelihood, bool((logs.argmax(-1) == wanted).all()), scored)


def text_log_likelihood(
    model: LoadedModel, tokens: Sequence[int], stride: int | None = None, batch_size: int = 8
) -> tuple[float, int]:
    """(sum in nats, tokens) over a whole text except its first token, in windows of the model's length, each token
    once. `stride`: distance between windows; default: their length, so that they do not overlap."""
    longest = model.longest
    stride = longest if stride is None else stride
    total, counted = 0.0, 0
    windows = list(_windows(len(tokens), longest, stride))
    for first in range(0, len(windows), batch_size):
        pairs = [(tokens[a:b], tokens[b:c]) for a, b, c in windows[first : first + batch_size]]
        for each in score(model, pairs, batch_size):
            total += each.log_likelihood
            counted += each.tokens
    return total, counted


def marked_log_likelihood(
    model: LoadedModel, texts: Sequence[tuple[Sequence[int], Marks]], batch_size: int = 8
) -> tuple[float, int]:
    """(sum in nats, tokens) over the marked tokens of texts that fit into the model, each after everything before it in
    its text; nothing is before the first one."""
    total, counted = 0.0, 0
    # Texts of similar length are batched: the shorter ones are padded at the end, which no earlier token attends to.
    order = sorted(texts, key=lambda text: len(text[0]))
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        length = len(part[-1][0])
        tokens_bs = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids, _ in part], device=model.device)
        logs_bsv = model.logits(tokens_bs[:, :-1]).log_softmax(-1)
        logs_bs = logs_bsv.gather(-1, tokens_bs[:, 1:].unsqueeze(-1)).squeeze(-1).double()
        for (_, marks), logs_s in zip(part, logs_bs, strict=True):
            marked = torch.from_numpy(marks[1:]).to(logs_s.device)
            total += logs_s[: len(marked)][marked].sum().item()
            counted += int(marked.sum())
    return total, counted


def _windows(length: int, longest: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start of the context, start and end of what is scored); the very first token is only context."""
    begin = 1
    while begin < length:
        end = min(begin + (longest if begin == 1 else stride), length)
        yield max(0, end - longest - 1), begin, end
        begin = end
