"""Text that a model writes: token by token, for several prompts at once, with a cache of keys and values. Shapes: b
sequences, v vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manta.workers.errors import MantaError
from manta.workers.inference.loaded_model import LoadedModel
from manta.workers.parallel.pipeline.forward_pass import KeyValueCache


class PromptTooLong(MantaError):
    """A prompt is empty, or leaves no room for the continuation."""


@dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt."""

    tokens: list[int]
    """Without the prompt, and without the token that ended it."""
    ended: bool
    """Whether the model ended it; otherwise there was no room for more."""


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    end: int | None = None,
    batch_size: int = 8,
) -> list[Continuation]:
    """At most `max_tokens` tokens after each of `prompts`, until the token `end`; `batch_size` prompts at a time.

    Raises PromptTooLong.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise PromptTooLong(f"prompt {number} is empty: give it at least one token")
        if len(prompt) + max_tokens > model.longest:
            raise PromptTooLong(
                f"prompt {number} has {len(prompt)} tokens, and with {max_tokens} more is longer than the model's "
                f"{model.longest}: shorten it, or ask for at most {max(0, model.longest - len(prompt))}"
            )
    written: list[Continuation] = []
    for first in range(0, len(prompts), batch_size):
        part = prompts[first : first + batch_size]
        numbers = range(first, first + len(part))
        written += _together(model, part, max_tokens, Sampler(sampling, numbers), end)
    return written


def _together(
    model: LoadedModel, prompts: Sequence[Sequence[int]], max_tokens: int, draw: Sampler, end: int | None
) -> list[Continuation]:
    """All sequences are always at the same position: those with longer prompts are still being read while others are
    being continued. So none needs padding, and the result of one does not depend on the others in the batch."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = [list(prompt) for prompt in prompts]
    ended = [False] * len(prompts)
    position = min(lengths)
    cache = KeyValueCache(max(lengths) + max_tokens)
    logits_bv = model.next_logits(torch.tensor([prompt[:position] for prompt in prompts]), cache)
    while True:
        room = [len(text) < n + max_tokens for text, n in zip(tokens, lengths, strict=True)]
        writing = [
            position >= n and has_room and not done for n, has_room, done in zip(lengths, room, ended, strict=True)
        ]
        for number, token in enumerate(draw(logits_bv, writing)):
            if token is not None:
                ended[number] = token == end
                tokens[number] += [] if ended[number] else [token]
        if all(done or len(text) == n + max_tokens for done, text, n in zip(ended, tokens, lengths, strict=True)):
            return [Continuation(text[n:], done) for text, n, done in zip(tokens, lengths, ended, strict=True)]
        # A finished sequence continues to read, without effect, its last token.
        read = [text[position] if position < len(text) else text[-1] for text in tokens]
        logits_bv = model.next_logits(torch.tensor(read).unsqueeze(1), cache)
        position += 1


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits."""

    temperature: float = 0.0
    """Divisor of the logits; 0: always the most likely token."""
    top_k: int = 0
    """Draw from this many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens that together have this probability (nucleus sampling,
    arXiv:1904.09751)."""
    seed: int = 0
    """Seed of the draws; the same seed gives the same text, whatever else is in the batch."""


class Sampler:
    """Draws for some sequences, each with its own generator."""

    def __init__(self, sampling: Sampling, sequences: range):
        """`sequences`: their numbers among all requested ones, on which their draws depend."""
        self._sampling = sampling
        seeds = [(sampling.seed * 1_000_003 + n) % 2**64 for n in sequences]
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, logits_bv: torch.Tensor, wanted: Sequence[bool]) -> list[int | None]:
        """A token for each sequence that is `wanted`: a generator advances only when its sequence does."""
        if self._sampling.temperature == 0.0:
            rows = logits_bv.argmax(-1, keepdim=True).tolist()
        else:
            probabilities = self._probabilities(logits_bv).double().cpu()
            both = zip(probabilities, self._generators, wanted, strict=True)
            rows = [torch.multinomial(row, 1, generator=each).tolist() if want else [0] for row, each, want in both]
        return [row[0] if want else None for row, want in zip(rows, wanted, strict=True)]

    def _probabilities(self, logits_bv: torch.Tensor) -> torch.Tensor:
        scaled = logits_bv / self._sampling.temperature
        in_order, tokens = scaled.sort(-1, descending=True)
        probabilities = in_order.softmax(-1)
        left_out = probabilities.cumsum(-1) - probabilities >= self._sampling.top_p
        if self._sampling.top_k:
            left_out[:, self._sampling.top_k :] = True
        left_out[:, 0] = False
        kept = probabilities.masked_fill(left_out, 0.0)
        kept /= kept.sum(-1, keepdim=True)
        return torch.zeros_like(kept).scatter_(-1, tokens, kept)
