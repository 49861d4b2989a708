"""A byte-level BPE tokenizer that is trained on a job's own corpus (Sennrich et al. 2016, arXiv:1508.07909; over bytes
as in Radford et al. 2019), once, and stored next to the tokens.

Deterministic: pairs are merged by their count, and of equally frequent ones the one with the lowest ids first. Of a
large corpus only a part is read: the beginning of each shard, up to its share of `TRAINING_BYTES`.

`python -m manta.workers.data.trained_tokenizer PARENT`, with an order on stdin, is the process that does it, so that
its memory is not that of a rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manta.workers.config import BYTE_VOCABULARY, END_OF_TEXT, NO_TOKEN, TRAINED_VOCABULARY, DataConfig
from manta.workers.data.documents import texts_of
from manta.workers.data.read_errors import answer_of, raise_answered
from manta.workers.data.shards import Section, Shard, shards_of
from manta.workers.data.sources import CorpusFile, describe_corpus
from manta.workers.data.token_cache import FORMAT, Watcher, describe, key_of, locked
from manta.workers.data.tokenizer import FILE_NAME, ByteTokenizer, library
from manta.workers.errors import DataError, DataNotStored
from manta.workers.system.processes import ParentDeathSignal, process_state

TRAINING_BYTES = 2**28
POLL_SECONDS = 0.1


def trained_tokenizer(root: Path, files: Sequence[CorpusFile], data: DataConfig, watcher: Watcher) -> Path:
    """The tokenizer's file below `root`, trained on `files` if it does not exist. Raises DataError."""
    path, vocabulary = tokenizer_file(root, files, data), data.token_ids or TRAINED_VOCABULARY
    if path.exists():
        return path
    with locked(path.parent, watcher):
        if not path.exists():
            began = time.monotonic()
            message = f"training a tokenizer of {vocabulary} tokens on {describe_corpus(data)}"
            watcher.report("tokenizer_training", message, {"vocabulary": vocabulary})
            order = {
                "data": data.model_dump(mode="json"),
                "files": [file.path for file in files],
                "sizes": [file.size for file in files],
                "path": str(path),
            }
            _run(order, watcher)
            seconds = round(time.monotonic() - began, 3)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            message = f"trained a tokenizer of {vocabulary} tokens in {seconds:.1f} s"
            watcher.report(
                "tokenizer_trained", message, {"vocabulary": vocabulary, "seconds": seconds, "digest": digest}
            )
    return path


def tokenizer_file(root: Path, files: Sequence[CorpusFile], data: DataConfig) -> Path:
    """The path of the tokenizer for `files` once it is trained. Raises DataError."""
    kind = [FORMAT, data.token_ids, _end_of(data), TRAINING_BYTES]
    description = {"bpe": kind, "corpus": describe(files, data, ByteTokenizer())}
    return root / f"bpe-{key_of(description)}" / FILE_NAME


def train(files: Sequence[CorpusFile], data: DataConfig, path: Path) -> None:
    """Train on `files` and write the tokenizer's file. Raises DataError."""
    tokenizers = library()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=data.token_ids,
        special_tokens=[_end_of(data)],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = _training_texts(shards_of(files, data, cuts_are_exact=True), data)
    # The library requests the next text on a thread of its own, where templates of conversations cannot run.
    tokenizer.train_from_iterator(list(texts) if data.source == "chat" else texts, trainer)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if len(ids) < BYTE_VOCABULARY + 1:
        raise DataError(f"a tokenizer trained on {describe_corpus(data)} lacks bytes")  # a fault of the library
    begun = path.with_name(f"{path.name}.begun")
    with begun.open("w", encoding="utf-8") as file:
        file.write(tokenizer.to_str(pretty=False))
        file.flush()
        os.fsync(file.fileno())
    begun.rename(path)


def _end_of(data: DataConfig) -> str:
    return END_OF_TEXT if data.end_of_document in (None, NO_TOKEN) else str(data.end_of_document)


def _training_texts(shards: Sequence[Shard], data: DataConfig) -> Iterator[str]:
    budget = TRAINING_BYTES // max(1, len(shards))
    for shard in shards:
        left = budget
        for text in _texts(shard, data):
            left -= len(text.encode())
            yield text
            if left <= 0:
                break


def _texts(shard: Sequence[Section], data: DataConfig) -> Iterator[str]:
    return (each.text for section in shard for each in texts_of(section, data, cuts_are_exact=True))


def _run(order: dict[str, Any], watcher: Watcher) -> None:
    command = [sys.executable, "-P", "-m", "manta.workers.data.trained_tokenizer", str(os.getpid())]
    # In a process group of its own: an interrupt is meant for this process, which ends the other.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its exit code says more
                process.stdin.write(json.dumps(order))
                process.stdin.close()
            used = 0.0
            while process.poll() is None:
                state = process_state(process.pid)
                if state is not None and state.cpu_seconds > used:
                    used = state.cpu_seconds
                    watcher.alive()
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()
        output = process.stdout.read() if process.stdout is not None else ""
    raise_answered(json.loads(output) if output else {})
    if process.returncode:
        raise DataError(f"the process that trains the tokenizer ended with exit code {process.returncode}")


def main(parent: int, order: dict[str, Any]) -> int:
    """Carry out an order; errors are written to stdout, see `answer_of`."""
    ParentDeathSignal().arm(parent)
    files = [CorpusFile(path, size) for path, size in zip(order["files"], order["sizes"], strict=True)]
    try:
        train(files, DataConfig.model_validate(order["data"]), Path(order["path"]))
    except DataError as error:
        print(json.dumps(answer_of(error)))
        return 1
    except OSError as error:
        why = f"the tokenizer cannot be kept: {error.filename or order['path']} ({error.strerror or error})"
        print(json.dumps(answer_of(DataNotStored(why))))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.load(sys.stdin)))
