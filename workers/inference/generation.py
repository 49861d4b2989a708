"""Text that a model writes: token by token, for several prompts at once, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.errors import MantaError
from workers.inference.loaded_model import LoadedModel
from workers.inference.sampling import Sampler, Sampling
from workers.parallel.tensor.key_value_cache import KeyValueCache


class PromptTooLong(MantaError):
    """A prompt is empty, or leaves no room for the continuation."""


@dataclass(frozen=True)
class Written:
    """The continuation of a prompt."""

    tokens: list[int]
    """Without the prompt, and without the token that ended it."""
    ended: bool
    """Whether the model ended it; otherwise there was no room for more."""


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    most_tokens: int,
    sampling: Sampling,
    end: int | None = None,
    batch_size: int = 8,
) -> list[Written]:
    """At most `most_tokens` tokens after each of `prompts`, until the token `end`; `batch_size` prompts at a time.

    Raises PromptTooLong.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise PromptTooLong(f"prompt {number} is empty: give it at least one token")
        if len(prompt) + most_tokens > model.longest:
            raise PromptTooLong(
                f"prompt {number} has {len(prompt)} tokens, and with {most_tokens} more is longer than the model's "
                f"{model.longest}: shorten it, or ask for at most {max(0, model.longest - len(prompt))}"
            )
    written: list[Written] = []
    for first in range(0, len(prompts), batch_size):
        part = prompts[first : first + batch_size]
        numbers = range(first, first + len(part))
        written += _together(model, part, most_tokens, Sampler(sampling, numbers), end)
    return written


def _together(
    model: LoadedModel, prompts: Sequence[Sequence[int]], most_tokens: int, draw: Sampler, end: int | None
) -> list[Written]:
    """All sequences are always at the same position: those with longer prompts are still being read while others are
    being continued. So none needs padding, and the result of one does not depend on the others in the batch."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = [list(prompt) for prompt in prompts]
    ended = [False] * len(prompts)
    position = min(lengths)
    cache = KeyValueCache(max(lengths) + most_tokens)
    logits_bv = model.next_logits(torch.tensor([prompt[:position] for prompt in prompts]), cache)
    while True:
        room = [len(text) < n + most_tokens for text, n in zip(tokens, lengths, strict=True)]
        writing = [
            position >= n and has_room and not done for n, has_room, done in zip(lengths, room, ended, strict=True)
        ]
        for number, token in enumerate(draw(logits_bv, writing)):
            if token is not None:
                ended[number] = token == end
                tokens[number] += [] if ended[number] else [token]
        if all(done or len(text) == n + most_tokens for done, text, n in zip(ended, tokens, lengths, strict=True)):
            return [Written(text[n:], done) for text, n, done in zip(tokens, lengths, ended, strict=True)]
        # A finished sequence continues to read, without effect, its last token.
        read = [text[position] if position < len(text) else text[-1] for text in tokens]
        logits_bv = model.next_logits(torch.tensor(read).unsqueeze(1), cache)
        position += 1
