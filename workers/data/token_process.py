"""Tokenizes the shards of a corpus with several processes, each of which takes the next shard when it has finished one.

`python -m manta.workers.data.token_process PARENT` is such a process: it turns shards into files of tokens, and ends
together with the process that starts it. Its stdin has the `Order` and then one shard per line, `{"shard",
"sections"}`; its stdout has lines of JSON: its progress, `{"bytes", "tokens"}`, and at the shard's end its
`ShardResult`, or `{"error"}` or `{"not_stored"}` and then nothing more. A shard has three files, one of conversations
four (with marks: a byte per token, 1 if it is learned). The last one exists when the others are complete; all are
written under a temporary name first.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from manta.workers.config import DataConfig
from manta.workers.data.documents import Text, raw_pieces_of, texts_of
from manta.workers.data.read_errors import answer_of
from manta.workers.data.shards import Section
from manta.workers.data.sources import is_compressed, kind_of_file
from manta.workers.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, open_tokenizer, tokens_around
from manta.workers.errors import DataError, DataNotStored
from manta.workers.system.processes import ParentDeathSignal

if TYPE_CHECKING:
    from manta.workers.data.chat_template import ChatTemplate


import contextlib
import selectors
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import field

from manta.workers.data.read_errors import raise_answered
from manta.workers.data.shards import Shard
from manta.workers.system.processes import process_state

BATCH_CHARACTERS = 2**18
"""Size of texts that are encoded at once: the library needs up to a hundred times as much memory for their tokens."""
_CODES = {np.dtype(np.uint16): "H", np.dtype(np.int32): "i"}


@dataclass(frozen=True)
class Order:
    """Settings common to all shards."""

    data: dict[str, Any]
    """The DataConfig."""
    tokenizer: str | None
    """File of a trained tokenizer; None: the tokenizer of `data`."""
    digest: str
    """Digest of the tokenizer, which must not have changed."""
    dtype: str
    """Type of the tokens."""
    folder: str
    """Where the files go."""
    template: dict[str, Any] | None = None
    """The ChatTemplate of conversations."""


@dataclass(frozen=True)
class ShardResult:
    """Record of a completed shard."""

    number: int
    tokens: int
    documents: int
    """Documents that end in the shard."""
    sequences: int
    bytes: int
    """Bytes of the sections that it is made from."""
    digest: str
    """SHA-256 of its tokens, and of their marks."""
    left_out: int = 0
    """Conversations without an answer, or documents without text."""


def stem(folder: str | Path, number: int) -> Path:
    """Prefix of the names of a shard's files."""
    return Path(folder) / f"shard-{number:05d}"


def main(parent: int, requests: IO[str], answers: IO[str]) -> int:
    """Process shards until there are no more requests."""
    ParentDeathSignal().arm(parent)
    order = Order(**json.loads(requests.readline()))
    # Each of these processes has a core of its own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        data = DataConfig.model_validate(order.data)
        tokenizer = open_tokenizer(data, order.tokenizer)
        if tokenizer.digest != order.digest:
            raise DataError(f"{order.tokenizer or data.tokenizer} was changed while the corpus was being tokenized")
        writer = _Writer(data, tokenizer, order, lambda size, tokens: answer({"bytes": size, "tokens": tokens}))
        for line in requests:
            asked = json.loads(line)
            sections = [Section(**section) for section in asked["sections"]]
            answer(asdict(writer.write(int(asked["shard"]), sections)))
    except DataError as error:
        answer(answer_of(error))
        return 1
    except OSError as error:
        why = f"cannot write tokens: {error.filename or order.folder} ({error.strerror or error})"
        answer(answer_of(DataNotStored(why)))
        return 1
    return 0


@dataclass(frozen=True)
class _Encoded:
    """Some encoded sequences."""

    ids: npt.NDArray[Any]
    """Tokens of the sequences, end to end."""
    parts: list[tuple[int, bool]]
    """Length of each, and whether a document ends with it."""
    marks: npt.NDArray[np.bool_] | None = None
    """Conversations only: which tokens are learned."""


class _Writer:
    """Writes shards."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, order: Order, progress: Callable[[int, int], None]):
        self._data, self._tokenizer, self._folder, self._progress = data, tokenizer, order.folder, progress
        self._dtype = np.dtype(order.dtype)
        self._before, self._after = tokens_around(data, tokenizer)
        self._template = None if order.template is None else _template_of(order.template)
        self._left_out = 0

    def write(self, number: int, sections: Sequence[Section]) -> ShardResult:
        """The files of shard `number`."""
        names = stem(self._folder, number)
        digest, tokens, self._left_out = hashlib.sha256(), 0, 0
        lengths, ends = array("i"), bytearray()
        kinds = ("tokens", "npz", "json") if self._template is None else ("tokens", "marks", "npz", "json")
        with ExitStack() as opened:
            file, *more = (opened.enter_context(Path(f"{names}.{kind}.begun").open("wb")) for kind in kinds[:-2])
            for sequence in self._sequences(sections):
                content = sequence.ids.view(np.uint8).data
                file.write(content)
                digest.update(content)
                if sequence.marks is not None:
                    more[0].write(sequence.marks.view(np.uint8).data)
                    digest.update(sequence.marks.view(np.uint8).data)
                for length, end in sequence.parts:
                    lengths.append(length)
                    ends.append(end)
                tokens += len(sequence.ids)
            for written in (file, *more):
                written.flush()
                os.fsync(written.fileno())
        size = sum(section.bytes for section in sections)
        result = ShardResult(number, tokens, sum(ends), len(lengths), size, digest.hexdigest(), self._left_out)
        with Path(f"{names}.npz.begun").open("wb") as file:
            np.savez(file, lengths=np.array(lengths, np.int32), ends=np.frombuffer(bytes(ends), bool))
        Path(f"{names}.json.begun").write_text(json.dumps(asdict(result)), encoding="ascii")
        for kind in kinds:
            Path(f"{names}.{kind}.begun").rename(f"{names}.{kind}")
        return result

    def _sequences(self, sections: Sequence[Section]) -> Iterator[_Encoded]:
        for section in sections:
            left = section.bytes
            is_plain = not is_compressed(section.path) and kind_of_file(section.path, self._data.source) != "parquet"
            for batch in self._batches(section):
                encoded = self._encoded(batch) if self._template is None else self._conversations(batch)
                size = min(left, sum(_size(each) for each in batch)) if is_plain else 0
                left -= size
                self._progress(size, len(encoded.ids))
                yield encoded
            self._progress(left, 0)

    def _batches(self, section: Section) -> Iterator[list[Any]]:
        if isinstance(self._tokenizer, ByteTokenizer) and self._data.source in ("text", "python-stdlib"):
            for raw in raw_pieces_of(section):
                yield [raw]
            return
        batch: list[Text] = []
        size = 0
        cuts_are_exact = self._template is None and self._tokenizer.cuts_are_exact
        for text in texts_of(section, self._data, cuts_are_exact, self._template):
            if not text.text:
                self._left_out += 1
                continue
            batch.append(text)
            size += len(text.text)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _conversations(self, batch: list[Text]) -> _Encoded:
        """Conversations in which something is learned other than the first token, which nothing comes before. The
        template has written everything, so no token is added."""
        lists, marks, parts = [], [], []
        for ids, learned in self._encode([(each.text, each.learned or ()) for each in batch], batch):
            if learned[1:].any():
                lists.append(np.array(list(ids), self._dtype))
                marks.append(learned)
                parts.append((len(ids), True))
            else:
                self._left_out += 1
        empty = np.zeros(0, self._dtype), np.zeros(0, bool)
        return _Encoded(np.concatenate([*lists, empty[0]]), parts, np.concatenate([*marks, empty[1]]))

    def _encoded(self, batch: list[Any]) -> _Encoded:
        if isinstance(batch[0], Text):
            encoded: Sequence[Any] = self._encode([each.text for each in batch], batch)
        else:
            encoded = [each.content for each in batch]
        parts, arrays = [], []
        for each, ids in zip(batch, encoded, strict=True):
            tail = self._after if each.ends else []
            if isinstance(ids, bytes):
                head: list[int] = []
                arrays += [np.frombuffer(ids, np.uint8).astype(self._dtype), np.array(tail, self._dtype)]
            else:
                head = self._before if each.begins else []
                arrays.append(np.frombuffer(array(_CODES[self._dtype], head + ids + tail), self._dtype))
            parts.append((len(head) + len(ids) + len(tail), each.ends))
        return _Encoded(np.concatenate(arrays), parts)

    def _encode(self, texts: list[Any], batch: list[Text]) -> Sequence[Any]:
        """Encodes texts, or texts with their spans."""
        try:
            if self._template is None:
                return self._tokenizer.encode(texts)
            return self._tokenizer.encode_marked([text for text, _ in texts], [spans for _, spans in texts])
        except Exception as error:  # the library's errors have no type of their own
            if isinstance(error, MemoryError) or not isinstance(self._tokenizer, FileTokenizer):
                raise
            if len(batch) > 1:  # find out which it is
                pairs = zip(texts, batch, strict=True)
                return [ids for text, each in pairs for ids in self._encode([text], [each])]
            raise DataError(f"{batch[0].where}: the tokenizer does not accept this text ({error})") from error


def _template_of(document: dict[str, Any]) -> ChatTemplate:
    from manta.workers.data.chat_template import ChatTemplate

    return ChatTemplate.of_document(document)


def _size(entry: Any) -> int:
    return len(entry.text.encode()) if isinstance(entry, Text) else len(entry.content)


POLL_SECONDS = 0.5
MAX_TRIES = 3
"""Number of attempts for a shard whose process is killed."""


@dataclass
class Counts:
    """Progress of the work."""

    bytes: int = 0
    """Bytes of the corpus's files that are done."""
    tokens: int = 0


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    shard: int | None = None
    shard_progress: Counts = field(default_factory=Counts)
    """Progress with its present shard."""
    cpu_seconds: float = 0.0
    received: bytes = b""
    """Incomplete last line."""

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, content: dict[str, Any]) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed when its answers are read
            self.process.stdin.write(json.dumps(content).encode() + b"\n")
            self.process.stdin.flush()

    def lines(self) -> list[bytes] | None:
        """Messages since the last call; None at the end of the process."""
        content = os.read(self.answers.fileno(), 2**16)
        *lines, self.received = (self.received + content).split(b"\n")
        return lines if content else None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def tokenize_shards(
    order: Order,
    shards: Mapping[int, Shard],
    alive: Callable[[], object],
    progress: Callable[[Counts], object],
    processes: int | None = None,
) -> list[ShardResult]:
    """Results of `shards`, by number, in any order. `alive` is called whenever one of the processes makes progress;
    `progress` with the total progress; `processes`: number of processes, by default one per core. Raises DataError."""
    work = _Work(order, shards, alive, progress)
    try:
        return work.run(min(processes or cores(), len(shards)))
    finally:
        work.close()


class _Work:
    def __init__(
        self,
        order: Order,
        shards: Mapping[int, Shard],
        alive: Callable[[], object],
        progress: Callable[[Counts], object],
    ):
        self._order, self._shards, self._alive, self._progress = order, shards, alive, progress
        self._waiting = sorted(shards, reverse=True)
        self._tries = dict.fromkeys(shards, 0)
        self._selector = selectors.DefaultSelector()
        self._workers: set[_Worker] = set()
        self._done = Counts()
        self._results: list[ShardResult] = []

    def run(self, processes: int) -> list[ShardResult]:
        for _ in range(processes):
            self._start()
        while len(self._results) < len(self._shards):
            for key, _ in self._selector.select(POLL_SECONDS):
                self._receive(key.data)
            self._check_cpu_time()
        return self._results

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.communicate()
        self._selector.close()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "manta.workers.data.token_process", str(os.getpid())]
        # In a process group of its own: an interrupt is meant for this process, which ends the others.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        worker = _Worker(process)
        self._workers.add(worker)
        worker.send(asdict(self._order))
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        self._assign_next(worker)

    def _assign_next(self, worker: _Worker) -> None:
        worker.shard, worker.shard_progress = None, Counts()
        if not self._waiting:
            return
        number = worker.shard = self._waiting.pop()
        self._tries[number] += 1
        worker.send({"shard": number, "sections": [asdict(section) for section in self._shards[number]]})

    def _receive(self, worker: _Worker) -> None:
        lines = worker.lines()
        if lines is None:
            self._ended(worker)
            return
        for line in lines:
            self._alive()
            self._handle(worker, json.loads(line))

    def _handle(self, worker: _Worker, answer: dict[str, Any]) -> None:
        raise_answered(answer)
        if "number" in answer:
            self._results.append(ShardResult(**answer))
            self._assign_next(worker)
        else:
            for counts in (worker.shard_progress, self._done):
                counts.bytes += answer["bytes"]
                counts.tokens += answer["tokens"]
            self._progress(self._done)

    def _ended(self, worker: _Worker) -> None:
        """The process was killed, or failed without an error message."""
        self._selector.unregister(worker.answers)
        self._workers.discard(worker)
        worker.process.communicate()
        if worker.shard is None:
            return
        sections = self._shards[worker.shard]
        if worker.process.returncode == -signal.SIGVTALRM:
            raise DataError(f"{sections[0].path}: the chat template does not come to an end with some conversation")
        if self._tries[worker.shard] >= MAX_TRIES or worker.process.returncode >= 0:
            raise DataError(
                f"the process that tokenizes {sections[0].path} ended with exit code {worker.process.returncode}, "
                "perhaps for lack of memory"
            )
        self._done.bytes -= worker.shard_progress.bytes
        self._done.tokens -= worker.shard_progress.tokens
        self._waiting.append(worker.shard)
        self._start()

    def _check_cpu_time(self) -> None:
        """Count CPU time of any of them as progress, since a large shard takes long without a message."""
        for worker in self._workers:
            state = process_state(worker.process.pid)
            if state is not None and state.cpu_seconds > worker.cpu_seconds:
                worker.cpu_seconds = state.cpu_seconds
                self._alive()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.stdin, sys.stdout))
