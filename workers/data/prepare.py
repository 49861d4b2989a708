"""A job's corpus as a sequence of tokens: read in place if its bytes are the tokens, otherwise from the cache, after
tokenizing what is missing."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from manta.workers.config import DataConfig, JobSpec
from manta.workers.data.corpus_record import as_recorded, as_recorded_tokens, with_digests
from manta.workers.data.indexed_dataset import IndexedTokens
from manta.workers.data.packed_conversations import Marks, PackedConversations
from manta.workers.data.read_errors import is_of_the_storage, read_error
from manta.workers.data.sources import (
    CorpusFile,
    check_tokenizer,
    check_vocabulary,
    corpus_files,
    describe_corpus,
    parts_of,
    prefixes_of,
    split_tokens,
)
from manta.workers.data.token_cache import (
    NO_WATCHER,
    TokenInfo,
    Watcher,
    cached_marks,
    cached_tokens,
    describe,
    key_of,
    locked,
    read_info,
    write_json,
)
from manta.workers.data.tokenizer import (
    CHAT_FILE,
    FILE_NAME,
    FileTokenizer,
    Tokenizer,
    content_of,
    open_tokenizer,
    tokenizer_path,
)
from manta.workers.data.trained_tokenizer import tokenizer_file, trained_tokenizer
from manta.workers.data.unchanged_file import UnchangedFile
from manta.workers.errors import DataError
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location

_SCAN_TOKENS = 2**24

PREVIEW_TOKENS = 400
"""Tokens of a corpus that are shown to the user."""

MAX_OPEN = 256
"""Files that are open at a time."""


class Row(Protocol):
    """Tokens end to end."""

    def __len__(self) -> int:
        """Number of tokens."""

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) as int64. Raises IndexError outside of the row."""

    def close(self) -> None:
        """Let go of the files."""


class Corpus:
    """The concatenated rows of the corpus's parts. No read crosses a boundary between parts."""

    def __init__(self, parts: Sequence[Row], digest: str = "", end_of_document: int | None = None):
        """`digest`: identifies the tokens; of files that are read in place their names and sizes. `end_of_document`:
        the token that follows each document, if known."""
        self.parts, self.digest, self.end_of_document = list(parts), digest, end_of_document
        self._ends = list(accumulate(map(len, self.parts)))
        self.begins = [end - len(part) for end, part in zip(self._ends, self.parts, strict=True)]
        """First token of each part."""

    def __len__(self) -> int:
        """Number of tokens."""
        return self._ends[-1]

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length), which lie in one part. Raises IndexError, DataError."""
        part, first = self._locate(start)
        return part.read(first, length)

    def marks(self, start: int, length: int) -> Marks | None:
        """The marks of those tokens: None except for conversations. Raises IndexError."""
        part, first = self._locate(start)
        return part.marks(first, length) if isinstance(part, PackedConversations) else None

    def _locate(self, token: int) -> tuple[Row, int]:
        part = min(bisect.bisect_right(self._ends, token), len(self.parts) - 1)
        return self.parts[part], token - self.begins[part]

    def close(self) -> None:
        """Let go of the files."""
        for part in self.parts:
            part.close()


def splits_of(spec: JobSpec, corpus: Corpus) -> list[tuple[int, int]]:
    """Tokens of the training and of the validation part of each part of the spec's `corpus`. Raises DataError if one is
    too short."""
    return [
        row.split(spec) if isinstance(row, PackedConversations) else split_tokens(spec, part, len(row))
        for part, row in zip(parts_of(spec.data), corpus.parts, strict=True)
    ]


@dataclass(frozen=True)
class _CachedPart:
    """A part that was read from the cache."""

    row: IndexedTokens | PackedConversations
    info: TokenInfo
    is_new: bool


def open_corpus(
    spec: JobSpec,
    cache: Path | None = None,
    record: Location | None = None,
    records: bool = False,
    watcher: Watcher = NO_WATCHER,
    data: DataConfig | None = None,
) -> Corpus:
    """The corpus of `spec`, tokenized first if necessary. `cache`: folder for tokens; `record`: file that records the
    corpus as it was when the job began; `records`: whether this process writes it; `data`: another corpus, such as a
    validation set, which is tokenized like the job's corpus. Raises DataError if the corpus is unsuitable or has
    changed, DataUnreadable if its disk or mount does not work."""
    data = data or spec.data
    try:
        return _open(spec, cache, record, records, watcher, data)
    except OSError as error:
        if not is_of_the_storage(error):
            raise
        raise read_error(error.filename or describe_corpus(data), error) from error


def _open(
    spec: JobSpec, cache: Path | None, record: Location | None, records: bool, watcher: Watcher, data: DataConfig
) -> Corpus:
    parts = parts_of(data)
    files = [corpus_files(part) for part in parts]
    if not data.is_read_in_place:
        files = [with_digests(each) for each in files]
    if record is not None:
        every = {file.path: file for each in files for file in each}
        recorded = {file.path: file for file in as_recorded(list(every.values()), record, records)}
        files = [[recorded[file.path] for file in each] for each in files]
    if data.is_read_in_place:
        return Corpus([ByteCorpus(each) for each in files], _digest_of_sizes(files))
    if data.source == "megatron":
        end = None
        if data.tokenizer_file is not None:
            end = open_tokenizer(data).end_of_document
        if data is spec.data and data.tokenizer_file is not None:
            file = tokenizer_path(data.tokenizer_file)
            digest = {f"the tokenizer {data.tokenizer}": open_tokenizer(data).digest}
            _pin(record, records, digest, file)
        return Corpus(_datasets(spec, files, cache, watcher), _digest_of_sizes(files), end)
    if cache is None:
        raise ValueError("tokens need a folder to be kept in")
    return _Tokenized(spec, data, cache, record, records, watcher).corpus(list(zip(parts, files, strict=True)))


def _digest_of_sizes(parts: Sequence[Sequence[CorpusFile]]) -> str:
    sizes = [[(file.path, file.size) for file in files] for files in parts]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()


Parts = Sequence[tuple[DataConfig, Sequence[CorpusFile]]]


@dataclass(frozen=True)
class _Tokenized:
    """A corpus that has to be tokenized."""

    spec: JobSpec
    data: DataConfig
    cache: Path
    record: Location | None
    records: bool
    watcher: Watcher

    def corpus(self, parts: Parts) -> Corpus:
        """Tokens of the corpus, which is tokenized unless the cache has it."""
        began = time.monotonic()
        existed = self._all_exist(parts)
        # One lock for everything that a job needs, so that a single process creates it.
        with nullcontext() if existed else locked(self.cache / f"job-{self._key(parts)}", self.watcher):
            tokenizer, file = self._tokenizer()
            digest = {f"the tokenizer {self.spec.data.tokenizer}": tokenizer.digest}
            _pin(self.record, self.records, digest, file if self.data is self.spec.data else None)
            if self.data.source == "chat":
                _pin_template(self.record, self.records, self.data)
            cached = [self._cached_part(part, files, tokenizer, file) for part, files in parts]
        pins = {
            f"what is made of {describe_corpus(part)}": one.info.digest
            for (part, _), one in zip(parts, cached, strict=True)
        }
        noted = _pin(self.record, self.records, pins)
        if any(one.is_new for one in cached) or (noted and existed):
            self._report(cached, sum(len(files) for _, files in parts), time.monotonic() - began, tokenizer)
        whole = "".join([tokenizer.digest, *(one.info.digest for one in cached)])
        digest_of_all = hashlib.sha256(whole.encode()).hexdigest()
        return Corpus([one.row for one in cached], digest_of_all, tokenizer.end_of_document)

    def _cached_part(
        self, part: DataConfig, files: Sequence[CorpusFile], tokenizer: Tokenizer, file: Path | None
    ) -> _CachedPart:
        trained = file if part.tokenizer == "bpe" else None
        row, info, is_new = cached_tokens(self.cache, files, part, tokenizer, trained, self.watcher)
        if tokenizer.vocabulary > self.spec.vocabulary_size and len(row) and isinstance(tokenizer, FileTokenizer):
            _, highest = _bounds(row, {"tokens": key_of(describe(files, part, tokenizer))}, self.cache, self.watcher)
            whose = f"{describe_corpus(part)}, which has the token {tokenizer.text_of(highest)!r},"
            check_vocabulary(self.spec, highest + 1, whose)
        if part.source != "chat":
            return _CachedPart(row, info, is_new)
        length, held_out = self.spec.model.sequence_length, part.validation_fraction
        packed = PackedConversations(row, cached_marks(row, info), length, held_out, describe_corpus(part))
        return _CachedPart(packed, info, is_new)

    def _all_exist(self, parts: Parts) -> bool:
        """Whether all tokens already exist. Raises DataError."""
        trained = None
        if self.spec.data.tokenizer == "bpe":
            trained = tokenizer_file(self.cache, self._tokenizers_files(), self.spec.data)
            if not trained.exists():
                return False
        tokenizer = open_tokenizer(self.spec.data, trained)
        keys = [key_of(describe(files, part, tokenizer)) for part, files in parts]
        return all(read_info(self.cache / key) is not None for key in keys)

    def _key(self, parts: Parts) -> str:
        files = [[file.path for file in each] for _, each in parts]
        return key_of({"data": self.data.model_dump(mode="json"), "files": files})

    def _tokenizers_files(self) -> list[CorpusFile]:
        """The corpus that a tokenizer is trained on: the job's corpus, also for a validation set."""
        return [file for part in parts_of(self.spec.data) for file in with_digests(corpus_files(part))]

    def _tokenizer(self) -> tuple[Tokenizer, Path | None]:
        """The tokenizer, and its file if it has one."""
        path, data = None, self.spec.data
        if data.tokenizer == "bpe":
            path = trained_tokenizer(self.cache, self._tokenizers_files(), data, self.watcher)
        tokenizer = open_tokenizer(data, path)
        if isinstance(tokenizer, FileTokenizer):
            path = Path(tokenizer.path)
        check_tokenizer(self.spec, tokenizer, data.tokenizer_file or f"the {data.tokenizer} tokenizer")
        return tokenizer, path

    def _report(self, cached: Sequence[_CachedPart], files: int, seconds: float, tokenizer: Tokenizer) -> None:
        tokens, documents = sum(part.info.tokens for part in cached), sum(part.info.documents for part in cached)
        new = any(part.is_new for part in cached)
        place = f"in {files:,} files of" if files > 1 else "in"
        count = f"{tokens:,} tokens of {documents:,} documents {place} {describe_corpus(self.data)}"
        message = f"tokenized {count} in {seconds:.1f} s" if new else f"found {count}, tokenized before"
        data: dict[str, Any] = {"seconds": round(seconds, 3), "tokens": tokens, "documents": documents, "files": files}
        data |= {"made": new, "is_validation": self.data is not self.spec.data}
        data |= {"preview": _preview(cached[0].row, tokenizer)}
        without = sum(part.info.left_out for part in cached)
        if without and self.data.source != "chat":
            message += f"; {without} without text left out"
            data |= {"left_out": without}
        if self.data.source == "chat":
            rows = [part.row for part in cached if isinstance(part.row, PackedConversations)]
            cut = sum(row.cut for row in rows)
            message += f"; left out without an answer: {without}" if without else ""
            message += f"; truncated to the sequence length: {cut}" if cut else ""
            data |= {"left_out": without, "cut": cut, "epoch_tokens": sum(row.training_tokens for row in rows)}
        self.watcher.report("data_prepared", message, data)


def _preview(row: IndexedTokens | PackedConversations, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The beginning of a corpus as the model reads it, special tokens included: texts, each with whether it is
    learned."""
    if isinstance(row, PackedConversations):
        tokens, learned = row.beginning(PREVIEW_TOKENS)
    else:
        tokens = row.read(0, min(PREVIEW_TOKENS, len(row)))
        learned = np.ones(len(tokens), bool)
    if not len(tokens):
        return []
    pieces, written = [], ""
    for end in [*(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(tokens)]:
        text = tokenizer.decode(tokens[:end].tolist(), special=True)  # alone, a piece could lose a blank at its begin
        pieces.append((text[len(written) :], bool(learned[end - 1])))
        written = text
    return pieces


def _pin(record: Location | None, records: bool, pins: dict[str, str], tokenizer: Path | None = None) -> bool:
    """Compare digests with the record, or add them, with a copy of the tokenizer's file; returns whether any were
    added."""
    if record is None or not as_recorded_tokens(pins, record, records):
        return False
    if tokenizer is not None:
        with contextlib.suppress(OSError, DataError):
            files_of(record).write_atomically(record.parent / FILE_NAME, content_of(tokenizer))
    return True


def _pin_template(record: Location | None, records: bool, data: DataConfig) -> None:
    """Compare the chat template's digest with the record, or add it and store the template."""
    from manta.workers.data.chat_template import open_template

    template = open_template(data)
    if _pin(record, records, {"the chat template": template.digest}) and record is not None:
        with contextlib.suppress(OSError):
            content = json.dumps(template.as_document(), indent=1).encode()
            files_of(record).write_atomically(record.parent / CHAT_FILE, content)


def _datasets(spec: JobSpec, parts: Sequence[Sequence[CorpusFile]], cache: Path | None, watcher: Watcher) -> list[Row]:
    """The datasets of each part as one row."""
    with contextlib.ExitStack() as opened:  # if one is refused, none is kept
        rows = [_dataset(spec, files, cache, watcher, opened) for files in parts]
        opened.pop_all()
    return rows


def _dataset(
    spec: JobSpec, files: Sequence[CorpusFile], cache: Path | None, watcher: Watcher, opened: contextlib.ExitStack
) -> Row:
    rows = []
    for prefix in prefixes_of(files):
        row = opened.enter_context(contextlib.closing(IndexedTokens(prefix)))
        if not len(row):
            row.close()
            continue
        of_this = [file for file in files if file.path in (f"{prefix}.bin", f"{prefix}.idx")]
        changed = [[file.path, file.size, file.digest, Path(file.path).stat().st_mtime_ns] for file in of_this]
        lowest, highest = _bounds(row, {"files": changed}, cache, watcher)
        if lowest < 0:
            raise DataError(f"{prefix}.bin holds {lowest}, which is not a token")
        check_vocabulary(spec, highest + 1, f"{prefix}.bin")
        rows.append(row)
    return rows[0] if len(rows) == 1 else _Joined(rows)


def _bounds(row: IndexedTokens, content: dict[str, Any], cache: Path | None, watcher: Watcher) -> tuple[int, int]:
    """Lowest and highest id of a dataset, which is read once for this. `content`: identifies its tokens."""
    if cache is None:
        return _scan(row, watcher)
    folder = cache / f"ids-{key_of(content)}"
    path = folder / "ids.json"
    with locked(folder, watcher):
        try:
            recorded = json.loads(path.read_bytes())
            return int(recorded["lowest"]), int(recorded["highest"])
        except (OSError, ValueError, KeyError, TypeError):
            lowest, highest = _scan(row, watcher)
            with contextlib.suppress(OSError):  # a full disk: the next start reads the dataset again
                write_json(path, {"lowest": lowest, "highest": highest, "prefix": row.prefix})
            return lowest, highest


def _scan(row: IndexedTokens, watcher: Watcher) -> tuple[int, int]:
    bounds = []
    for start in range(0, len(row), _SCAN_TOKENS):
        bounds.append(row.bounds(start, min(start + _SCAN_TOKENS, len(row))))
        watcher.alive()
    return min(low for low, _ in bounds), max(high for _, high in bounds)


class _Joined:
    """Several rows as one; reads may cross their boundaries."""

    def __init__(self, rows: Sequence[Row]):
        """`rows` may be empty."""
        self._rows = list(rows)
        self._ends = list(accumulate(map(len, self._rows)))

    def __len__(self) -> int:
        """Number of tokens."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) as int64. Raises IndexError outside of the row."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of a row of {len(self)}")
        parts, index = [], bisect.bisect_right(self._ends, start)
        while length > 0:
            here = min(length, self._ends[index] - start)
            parts.append(self._rows[index].read(start - (self._ends[index] - len(self._rows[index])), here))
            start, length, index = start + here, length - here, index + 1
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def close(self) -> None:
        """Let go of the files."""
        for row in self._rows:
            row.close()


class ByteCorpus:
    """The concatenated bytes of the files; one byte is one token (ids 0 to 255)."""

    def __init__(self, files: list[CorpusFile]):
        self._files = files
        self._ends = list(accumulate(file.size for file in files))
        self._open: dict[int, UnchangedFile] = {}

    def __len__(self) -> int:
        """Number of tokens."""
        return self._ends[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as int64. Raises IndexError outside the corpus, DataError if a file was
        removed, truncated, overwritten or replaced since the job began, DataUnreadable if its disk or mount does not
        work."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of a corpus of {len(self)}")
        tokens = np.empty(length, np.uint8)
        left, index = tokens.data, bisect.bisect_right(self._ends, start)
        while left:
            offset = start - (self._ends[index] - self._files[index].size)
            count = min(len(left), self._files[index].size - offset)
            self._opened(index).read_into(left[:count], offset)
            left, start, index = left[count:], start + count, index + 1
        return tokens.astype(np.int64)

    def _opened(self, index: int) -> UnchangedFile:
        if index not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = self._files[index]
            self._open[index] = UnchangedFile(file.path, file.size, file.digest)
        return self._open[index]

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()
