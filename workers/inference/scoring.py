"""How likely a text is according to a model. Shapes: b sequences, s tokens, v vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.data.tokenizer import Marks
from workers.errors import MantaError
from workers.inference.loaded_model import LoadedModel


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
