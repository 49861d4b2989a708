"""Cache of tokenized corpora: a folder for each corpus, tokenizer and way of reading it.

ROOT/KEY/plan.json      what the tokens are made of; KEY is its SHA-256
ROOT/KEY/shard-N.*      what is done of it, while it is being made: the next process takes what is there
ROOT/KEY/tokens.bin, tokens.idx
                        the tokens (`indexed_dataset.py`)
ROOT/KEY/marks.bin      of conversations: a byte a token, 1 where it is learned
ROOT/KEY/cache.json     comes last: how many there are, and their digest
ROOT/KEY/lock           is held by the process that makes them, of which there is one at a time
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manta.workers.config import DataConfig
from manta.workers.data import token_process
from manta.workers.data.indexed_dataset import IndexedTokens, boundaries, write_index
from manta.workers.data.read_errors import is_of_the_storage, read_error
from manta.workers.data.shards import Shard, shards_of
from manta.workers.data.sources import CorpusFile, describe_corpus
from manta.workers.data.token_process import Counts, Order, ShardResult, tokenize_shards
from manta.workers.data.tokenizer import FileTokenizer, Tokenizer
from manta.workers.data.unchanged_file import digest_of
from manta.workers.errors import DataError, DataNotStored
from manta.workers.system.regular_files import open_regular

if TYPE_CHECKING:
    from manta.workers.data.chat_template import ChatTemplate

FORMAT = 1
"""Version of the cache. Incremented by a change after which the same corpus has different tokens."""
SECOND_FORMAT = 2
"""Version for conversations, and for texts that an added token keeps from being split: since 0.4.0 these have other
tokens."""
WAIT_SECONDS = 0.25
TOKENS = "tokens"
MARKS = "marks"


@dataclass(frozen=True)
class TokenInfo:
    """Contents of `cache.json`."""

    tokens: int
    documents: int
    files: int
    dtype: str
    digest: str
    """SHA-256 over those of the shards' tokens."""
    seconds: float
    """Seconds that tokenizing took, excluding earlier attempts."""
    sample: str
    """Digest of samples of the tokens (`unchanged_file.digest_of`)."""
    left_out: int = 0
    """Conversations without an answer, or documents without text."""


class Watcher:
    """Receives progress while data is prepared. This one ignores it."""

    processes: int | None = None
    """Number of tokenizing processes; None: one per core."""
    report_seconds: float = 10.0
    """Minimum seconds between progress reports."""
    report_growth: float = 0.05
    """Minimum time between progress reports, as a fraction of the elapsed time."""

    def alive(self) -> None:
        """Called several times a second while there is progress, also by another process."""

    def report(self, kind: str, message: str, data: dict[str, Any]) -> None:
        """A message for users; `kind` as for events."""


NO_WATCHER = Watcher()


def describe(files: Sequence[CorpusFile], data: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that the tokens of `files` depend on. Files are considered unchanged if path, size, samples and
    modification time are. Raises DataError."""
    more: dict[str, Any] = {"special_tokens": True} if data.special_tokens else {}
    if data.source == "chat":
        more |= {"template": _template(data).digest, "learned": "answers" if data.learns_answers else "all"}
    return more | {
        "format": _format(data, tokenizer),
        "source": data.source,
        "text_key": data.key if data.source in ("jsonl", "parquet", "chat") else None,
        "tokenizer": tokenizer.digest,
        "end_of_document": tokenizer.end_of_document,
        "dtype": dtype_for(tokenizer.vocabulary),
        "files": [[file.path, file.size, file.digest, _changed_at(file)] for file in files],
    }


def _format(data: DataConfig, tokenizer: Tokenizer) -> int:
    if data.source in ("text", "python-stdlib") and isinstance(tokenizer, FileTokenizer):
        return SECOND_FORMAT if tokenizer.has_tokens_across_cuts else FORMAT
    return SECOND_FORMAT if data.source == "chat" else FORMAT


def key_of(description: dict[str, Any]) -> str:
    """Name of the folder for this description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def dtype_for(vocabulary: int) -> str:
    """The smallest supported type for ids below `vocabulary`."""
    return "uint16" if vocabulary <= 2**16 else "int32"


@contextmanager
def locked(folder: Path, watcher: Watcher) -> Iterator[None]:
    """Create `folder` and hold its lock, waiting while another process holds it. Raises DataNotStored if the folder
    cannot be created or does not work now, DataError if its file system has no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        what = f"the tokens cannot be kept in {folder} ({error.strerror}): make it writable"
        raise DataNotStored(what) from error
    try:
        _wait_for(descriptor, folder, watcher)
        with suppress(OSError):  # a full disk: then others do not know which process it is
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, folder: Path, watcher: Watcher) -> None:
    """Acquire the lock of `folder`. Raises DataError if its file system has no locks, DataNotStored if it does not work
    now."""
    is_reported = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_reported:
                who = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                watcher.report("data_awaited", f"waiting for the tokens in {folder}, which {who} is creating", {})
                is_reported = True
            watcher.alive()
            time.sleep(WAIT_SECONDS)
        except OSError as error:
            if is_of_the_storage(error):
                raise DataNotStored(f"the tokens cannot be kept in {folder} ({error.strerror})") from error
            where = "set MANTA_TOKEN_CACHE to a folder on a file system that has locks"
            raise DataError(f"{folder} cannot be locked ({error.strerror}): {where}") from error
        else:
            return


def cached_tokens(
    root: Path,
    files: Sequence[CorpusFile],
    data: DataConfig,
    tokenizer: Tokenizer,
    trained: Path | None = None,
    watcher: Watcher = NO_WATCHER,
) -> tuple[IndexedTokens, TokenInfo, bool]:
    """The tokens of `files`, created if missing, and whether this process created them. `trained`: the file of a
    trained tokenizer. Raises DataError, DataNotStored."""
    description = describe(files, data, tokenizer)
    folder = root / key_of(description)
    info = read_info(folder)
    if info is not None:
        return IndexedTokens(folder / TOKENS, (info.dtype, info.tokens), info.sample), info, False
    with locked(folder, watcher):
        info, made = read_info(folder), False
        if info is None:
            try:
                info, made = _make(folder, description, files, data, tokenizer, trained, watcher), True
            except OSError as error:
                raise DataNotStored(f"the tokens cannot be kept in {folder} ({error.strerror or error})") from error
        return IndexedTokens(folder / TOKENS, (info.dtype, info.tokens), info.sample), info, made


def read_info(folder: Path) -> TokenInfo | None:
    """The description of the tokens in `folder`; None if they are incomplete or damaged."""
    try:
        info = TokenInfo(**json.loads((folder / "cache.json").read_bytes()))
        size, sample = _size_and_sample(folder)
    except (OSError, ValueError, TypeError):
        return None
    there = (folder / f"{TOKENS}.idx").exists() and size == info.tokens * np.dtype(info.dtype).itemsize
    return info if there and sample == info.sample else None


def _size_and_sample(folder: Path) -> tuple[int, str]:
    with open_regular(folder / f"{TOKENS}.bin", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return size, digest_of(file.fileno(), size)


def cached_marks(tokens: IndexedTokens, info: TokenInfo) -> IndexedTokens:
    """The marks of conversations for their `tokens`. Raises DataError."""
    return IndexedTokens(Path(tokens.prefix).with_name(MARKS), ("uint8", info.tokens))


def _template(data: DataConfig) -> ChatTemplate:
    from manta.workers.data.chat_template import open_template

    return open_template(data)


def _make(
    folder: Path,
    description: dict[str, Any],
    files: Sequence[CorpusFile],
    data: DataConfig,
    tokenizer: Tokenizer,
    trained: Path | None,
    watcher: Watcher,
) -> TokenInfo:
    began = time.monotonic()
    shards = shards_of(files, data, tokenizer.cuts_are_exact)
    write_json(folder / "plan.json", {**description, "shards": len(shards)})
    done = _done(folder, len(shards))
    order = Order(
        data.model_dump(mode="json"),
        None if trained is None else str(trained),
        tokenizer.digest,
        str(description["dtype"]),
        str(folder),
        _template(data).as_document() if data.source == "chat" else None,
    )
    progress = _Progress(data, files, shards, done, watcher)
    missing = {number: shard for number, shard in enumerate(shards) if number not in done}
    new = tokenize_shards(order, missing, watcher.alive, progress.note, watcher.processes) if missing else []
    results = sorted([*done.values(), *new], key=lambda result: result.number)
    if order.template is not None:
        _join_files(folder, results, "marks", watcher).rename(folder / f"{MARKS}.bin")
    _join(folder, results, order.dtype, watcher)
    info = TokenInfo(
        tokens=sum(result.tokens for result in results),
        documents=sum(result.documents for result in results),
        files=len(files),
        dtype=order.dtype,
        digest=hashlib.sha256("".join(result.digest for result in results).encode()).hexdigest(),
        seconds=round(time.monotonic() - began, 3),
        sample=_size_and_sample(folder)[1],
        left_out=sum(result.left_out for result in results),
    )
    write_json(folder / "cache.json", asdict(info))
    for leftover in folder.glob("shard-*"):
        leftover.unlink(missing_ok=True)
    return info


def _done(folder: Path, count: int) -> dict[int, ShardResult]:
    """The shards that an earlier attempt has finished."""
    done = {}
    for number in range(count):
        try:
            result = ShardResult(**json.loads(Path(f"{token_process.stem(folder, number)}.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            continue
        done[number] = result
    return done


def _join(folder: Path, results: Sequence[ShardResult], dtype: str, watcher: Watcher) -> None:
    """Join the shards' tokens to one dataset."""
    begun = _join_files(folder, results, TOKENS, watcher)
    lengths, ends = [], []
    for result in results:
        with np.load(f"{token_process.stem(folder, result.number)}.npz") as sequences:
            lengths.append(sequences["lengths"])
            ends.append(sequences["ends"])
    write_index(folder / f"{TOKENS}.begun", dtype, np.concatenate([*lengths, np.zeros(0, np.int32)]), boundaries(ends))
    (folder / f"{TOKENS}.begun.idx").rename(folder / f"{TOKENS}.idx")
    begun.rename(folder / f"{TOKENS}.bin")


def _join_files(folder: Path, results: Sequence[ShardResult], kind: str, watcher: Watcher) -> Path:
    """Concatenate the shards' files of a kind."""
    begun = folder / f"{kind}.begun.bin"
    with begun.open("wb") as file:
        for result in results:
            with Path(f"{token_process.stem(folder, result.number)}.{kind}").open("rb") as shard:
                shutil.copyfileobj(shard, file, 2**22)
            watcher.alive()
        file.flush()
        os.fsync(file.fileno())
    return begun


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file atomically."""
    begun = path.with_name(f"{path.name}.{os.getpid()}.begun")
    with begun.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    begun.rename(path)


class _Progress:
    """Reports progress from time to time."""

    def __init__(
        self,
        data: DataConfig,
        files: Sequence[CorpusFile],
        shards: Sequence[Shard],
        done: dict[int, ShardResult],
        watcher: Watcher,
    ):
        self._watcher, self._where = watcher, describe_corpus(data)
        self._all = max(1, sum(section.bytes for shard in shards for section in shard))
        self._before = sum(result.bytes for result in done.values())
        self._began = self._reported_at = time.monotonic()
        progress_note = f", of which {len(done)} shards are tokenized already" if done else ""
        count = f"{len(files)} file{'' if len(files) == 1 else 's'}"
        size = f"{self._all / 1e6:.1f} MB" if self._all >= 1e5 else f"{self._all / 1e3:.1f} kB"
        message = f"tokenizing {count} ({size}) of {self._where}{progress_note}"
        watcher.report("data_preparing", message, {"files": len(files), "bytes": self._all})

    def note(self, counts: Counts) -> None:
        """Work done so far, in addition to that of earlier attempts."""
        now = time.monotonic()
        pause = max(self._watcher.report_seconds, self._watcher.report_growth * (now - self._began))
        if now - self._reported_at < pause:
            return
        self._reported_at = now
        share = (self._before + counts.bytes) / self._all
        rate = counts.tokens / (now - self._began)
        self._watcher.report(
            "data_progress",
            f"tokenizing {self._where}: {share:.0%}, {rate:,.0f} tokens/s",
            {"percent": round(100 * share, 1), "tokens": counts.tokens, "tokens_per_second": round(rate)},
        )


def _changed_at(file: CorpusFile) -> int:
    try:
        return Path(file.path).stat().st_mtime_ns
    except OSError as error:
        raise read_error(file.path, error) from error
