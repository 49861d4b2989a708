"""The tasks for evaluating a model: how well it predicts a text, the last word of a passage, or the right one of
several answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import MantaError
from workers.inference.loaded_model import LoadedModel
from workers.inference.scoring import score, text_log_likelihood
from workers.inference.text_tokens import TextTokens
from workers.system.regular_files import read_regular

_MAX_BYTES = 2**30
"""Maximum size of a file of questions or texts, which is read as a whole."""


class BadTask(MantaError):
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
    """How well the documents are predicted, each separately, in windows at a distance of `stride` tokens. Raises
    BadTask."""
    if stride is not None and not 0 < stride <= model.longest:
        raise BadTask(
            f"windows cannot move on by {stride} tokens: 1 to {model.longest} are what the model reads at once"
        )
    total, counted, size = 0.0, 0, 0
    for document in documents:
        ids = tokens.encode(document)
        log_likelihood, count = text_log_likelihood(model, ids, stride, batch_size)
        if count:  # in a document of one token nothing is predicted, so its bytes do not count
            total, counted, size = total + log_likelihood, counted + count, size + len(document.encode())
    if not counted:
        raise BadTask("there is nothing to predict: the text has less than two tokens")
    loss = -total / counted
    return TextResult(loss, exponential(loss), -total / math.log(2) / size, counted)


def last_word(model: LoadedModel, tokens: TextTokens, passages: Sequence[str], batch_size: int = 8) -> Accuracy:
    """How often the last word of a passage is the most likely one according to the model, token by token, as in LAMBADA
    (arXiv:1606.06031). Raises BadTask."""
    pairs = []
    for number, passage in enumerate(passages, start=1):
        before, space, word = passage.rstrip().rpartition(" ")
        if not before or not word:
            raise BadTask(f"passage {number} has less than two words: {passage[:60]!r}")
        pairs.append((tokens.encode(before), tokens.encode(space + word)))
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
    pairs = [(tokens.encode(each.text), tokens.encode(choice)) for each in questions for choice in each.choices]
    scores = iter(score(model, pairs, batch_size))
    right = right_by_length = 0
    for question in questions:
        likelihoods = [next(scores).log_likelihood for _ in question.choices]
        shares = [value / len(choice.encode()) for value, choice in zip(likelihoods, question.choices, strict=True)]
        right += likelihoods.index(max(likelihoods)) == question.answer
        right_by_length += shares.index(max(shares)) == question.answer
    return Accuracy(right / len(questions), len(questions), by_length=right_by_length / len(questions))


def read_texts(path: Path) -> list[str]:
    """The documents of a file: for JSONL the `text` of each line; for any other file its whole content. Raises
    BadTask."""
    if path.suffix != ".jsonl":
        return [_content(path)]
    return [_string(each.get("text"), f"{path}, line {line}: 'text'") for line, each in _lines(path)]


def read_questions(path: Path) -> list[Question]:
    """Lines of JSON with `question`, `choices` and `answer`. Raises BadTask."""
    questions = []
    for line, each in _lines(path):
        where = f"{path}, line {line}"
        given, answer = each.get("choices"), each.get("answer")
        if not isinstance(given, list) or len(given) < 2:
            raise BadTask(f"{where}: 'choices' must be a list of at least two texts")
        texts = tuple(_string(choice, f"{where}: each of 'choices'") for choice in given)
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(texts):
            raise BadTask(f"{where}: 'answer' must be the number of the right choice, 0 to {len(texts) - 1}")
        questions.append(Question(_string(each.get("question"), f"{where}: 'question'"), texts, answer))
    return questions


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    # Split at line feeds only: `splitlines` also splits at characters that a text may contain in JSON, such as U+2028.
    lines = [(number, line) for number, line in enumerate(_content(path).split("\n"), start=1) if line.strip()]
    if not lines:
        raise BadTask(f"{path} is empty")
    for number, line in lines:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise BadTask(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise BadTask(f"{path}, line {number}: must be an object in braces")
        yield number, value


def _content(path: Path) -> str:
    try:
        return read_regular(path, _MAX_BYTES).decode()
    except OSError as error:
        raise BadTask(f"cannot be read: {path} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadTask(f"{path} is not UTF-8 at byte {error.start}") from error


def _string(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadTask(f"{what} must be a text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadTask(f"{what}: character {error.start + 1} is half of a surrogate pair") from error
    return value


def exponential(value: float) -> float:
    """e to the power of `value`; infinite if it exceeds fp64."""
    return math.exp(value) if value < 700 else math.inf
