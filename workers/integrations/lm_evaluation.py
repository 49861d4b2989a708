"""A trained model in EleutherAI's lm-evaluation-harness (`pip install lm-eval`), for its tasks:

    from manta.workers.integrations.lm_evaluation import MantaModel

    lm_eval.simple_evaluate(MantaModel("checkpoints"), tasks=["lambada_openai"])

No other module needs that library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import LM

from manta.workers.inference.command import checkpoint_at
from manta.workers.inference.generation import Sampling, generate
from manta.workers.inference.loaded_model import LoadedModel, TextTokens, text_tokens_of
from manta.workers.inference.tasks import score, text_log_likelihood
from manta.workers.storage.locations import parse_location

TOKENS = 256
"""Maximum number of generated tokens if a task does not set one."""


class MantaModel(LM):
    """The harness's interface of a model, for a checkpoint of any layout."""

    def __init__(self, checkpoint: str, device: str = "cpu", dtype: torch.dtype = torch.float32, batch_size: int = 8):
        """`checkpoint`: one, or the place of several, whose newest complete one is used. Raises CheckpointError."""
        super().__init__()
        location = checkpoint_at(parse_location(checkpoint))
        self._model, _ = LoadedModel.of_checkpoint(location, torch.device(device), dtype)
        self._tokens: TextTokens = text_tokens_of(self._model.spec, location)
        self._batch_size = batch_size

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation), the log-likelihood, and whether greedy decoding yields the continuation."""
        pairs = [self._pair(*request.args) for request in requests]
        return [(each.log_likelihood, each.is_greedy) for each in score(self._model, pairs, self._batch_size)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text."""
        texts = [self._start() + self._tokens.encode(request.args[0]) for request in requests]
        return [text_log_likelihood(self._model, text, batch_size=self._batch_size)[0] for text in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The generated continuation of each context, up to the first of its stop texts."""
        return [self._written(*request.args) for request in requests]

    def _start(self) -> list[int]:
        """Tokens before the beginning of a text: the end of the previous document, if the tokenizer has one."""
        return [] if self._tokens.end is None else [self._tokens.end]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both. They are encoded together, since a word may span the boundary."""
        if not context:
            return self._start(), self._tokens.encode(continuation)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before, whole = self._tokens.encode(context), self._tokens.encode(context + continuation)
        return whole[: len(before)], whole[len(before) :]

    def _written(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until", [])
        ends = [until] if isinstance(until, str) else list(until)
        sampled = bool(options.get("do_sample")) and options.get("temperature", 1.0) > 0
        sampling = Sampling(options.get("temperature", 1.0) if sampled else 0.0, top_p=options.get("top_p", 1.0))
        prompt, longest = self._start() + self._tokens.encode(context), self._model.longest
        # A context that fits is read as a whole; of a longer one, at least half the model's context length.
        most = min(int(options.get("max_gen_toks", TOKENS)), max(longest // 2, longest - len(prompt)))
        (written,) = generate(self._model, [prompt[-(longest - most) :]], most, sampling, self._tokens.end)
        text = self._tokens.decode(written.tokens)
        return text[: min((text.find(end) for end in ends if end and end in text), default=len(text))]
