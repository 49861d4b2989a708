"""Small tokenizers as files, trained in the test, plain encodings of whole texts to hold tokens against, and a watcher
that notes what preparing tells it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from manta.workers.data.token_cache import Watcher

TEXT = [
    f"The number {n} is {n * n} when squared, they say;\nétude №{n} follows.\n\n  - so\n; \n = {n} = \n \n\n\n"
    for n in range(300)
]


class RecordingWatcher(Watcher):
    """Keeps what it is told, and counts how often that all is alive."""

    report_seconds = report_growth = 0.0

    def __init__(self, processes: int = 1):
        self.said: list[tuple[str, str, dict[str, Any]]] = []
        self.lives, self.processes = 0, processes

    def alive(self) -> None:
        self.lives += 1

    def report(self, kind: str, message: str, data: dict[str, Any]) -> None:
        self.said.append((kind, message, data))

    @property
    def kinds(self) -> list[str]:
        """Of what it was told."""
        return [kind for kind, _, _ in self.said]


def byte_level(path: Path, size: int = 400, special: Sequence[str] = ("<|endoftext|>",)) -> Path:
    """As GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet)
    return _saved(tokenizer, trainer, path)


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_as_llama_3(path: Path) -> Path:
    """As those of tiktoken: words by a regular expression, then bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end_of_text|>"], initial_alphabet=alphabet)
    return _saved(tokenizer, trainer, path)


def sentence_piece_like(path: Path) -> Path:
    """As Llama 2's: spaces are characters, a text begins with one, and words go across lines' ends."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"])
    return _saved(tokenizer, trainer, path)


def _saved(tokenizer: Tokenizer, trainer: trainers.BpeTrainer, path: Path) -> Path:
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(path))
    return path


def plain_tokens(file: Path, documents: Sequence[str], end: str | None = "<|endoftext|>") -> list[int]:
    """What the library alone makes of whole documents, each followed by the token `end`."""
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tail = [] if end is None else [tokenizer.token_to_id(end)]
    encoded = tokenizer.encode_batch(list(documents), add_special_tokens=False)
    return [token for each in encoded for token in each.ids + tail]
