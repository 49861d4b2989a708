"""Tokenizing a corpus, compared with the library `tokenizers` alone, and reading them back in a training step.

Both make the same tokens of the same documents with the same tokenizer, in turns, so that the machine's other work
meets both. The library has all documents in memory and uses all cores (`encode_batch`, a thousand documents at a
time, whose result is dropped); we read them from a .jsonl file, start our processes, and have the tokens on disk at the
end. All ids are compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch

from benchmarks.support.jobs import SHAKESPEARE, nanogpt
from benchmarks.support.report import Report, deliver, parser
from workers.comm.comm import Comm
from workers.comm.grid import RankGrid
from workers.config import DataConfig
from workers.data.corpus_record import with_heads
from workers.data.indexed_dataset import IndexedTokens
from workers.data.sources import corpus_files
from workers.data.token_cache import SILENT, cached_tokens
from workers.data.token_processes import cores
from workers.data.tokenizer import open_tokenizer
from workers.data.trained_tokenizer import trained_tokenizer
from workers.errors import DataError
from workers.protocol.messages import Resume
from workers.reporter import Reporter
from workers.spec.reading import parse_job_spec
from workers.trainer import Places, Trainer

TURNS = 5
MEGABYTES = 40
VOCABULARY = 8192
BATCH = 1000
"""Documents that the library is given at once, as Hugging Face's `datasets` does."""
STEPS = 100
TEXTS = SHAKESPEARE.parent


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("tokenize", __doc__)
    options.add_argument(
        "--texts", type=Path, default=TEXTS, help="folder of .txt files, next to which Python's library"
    )
    options.add_argument(
        "--megabytes", type=float, default=MEGABYTES, help=f"size of the corpus (default: {MEGABYTES})"
    )
    options.add_argument("--turns", type=int, default=TURNS, help=f"of each side (default: {TURNS})")
    options.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Run both sides. Raises DataError when there is no text."""
    report = Report("tokenize", options.seed)
    documents = _documents(options.texts, int(options.megabytes * 1e6))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path = root / "corpus.jsonl"
        path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents))
        data = DataConfig(source="jsonl", paths=(str(path),), tokenizer="bpe", tokenizer_vocabulary=VOCABULARY)
        files = with_heads(corpus_files(data))
        began = time.perf_counter()
        file = trained_tokenizer(root / "cache", files, data, SILENT)
        report.add("training_a_tokenizer", round(time.perf_counter() - began, 2), "s")
        plain = tokenizers.Tokenizer.from_file(str(file))
        sides: dict[str, list[float]] = {"ours": [], "encode_batch": [], "encode_batch_fast": []}
        for _ in range(options.turns):
            shutil.rmtree(root / "tokens", ignore_errors=True)
            began = time.perf_counter()
            row, info, _ = cached_tokens(root / "tokens", files, data, open_tokenizer(data, file), file)
            sides["ours"].append(time.perf_counter() - began)
            for name, encode in (("encode_batch", plain.encode_batch), ("encode_batch_fast", plain.encode_batch_fast)):
                began = time.perf_counter()
                for at in range(0, len(documents), BATCH):
                    encode(documents[at : at + BATCH], add_special_tokens=False)
                sides[name].append(time.perf_counter() - began)
        same = _same_tokens(row, documents, plain)
        _add_rates(report, sides, info.tokens, sum(len(text.encode()) for text in documents))
        report.add("same_tokens", same, "bool", True)
        _add_reading(report, options, data, file, root)
    report.settings = {
        "documents": len(documents), "megabytes": options.megabytes, "vocabulary": VOCABULARY, "processes": cores(),
        "turns": options.turns, "steps": options.steps,
    }  # fmt: skip
    report.samples = {f"{name}_seconds": [round(each, 3) for each in seconds] for name, seconds in sides.items()}
    return report


def _documents(folder: Path, size: int) -> list[str]:
    """Paragraphs of the folder's texts and files of Python's library, over and over up to `size` bytes."""
    texts = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    if not texts:
        raise DataError(f"no .txt file in {folder}: name another folder with --texts")
    once = [
        "\n\n".join(text.split("\n\n")[at : at + 8]) for text in texts for at in range(0, text.count("\n\n") + 1, 8)
    ]
    once += ["\n".join(text.split("\n")[at : at + 40]) for text in texts for at in range(0, text.count("\n") + 1, 40)]
    for entry in corpus_files(DataConfig(source="python-stdlib")):
        once.append(Path(entry.path).read_text(encoding="utf-8"))
    documents: list[str] = []
    left = size
    while left > 0:
        for text in filter(None, once):
            documents.append(text)
            left -= len(text.encode())
            if left <= 0:
                break
    return documents


def _same_tokens(row: IndexedTokens, documents: Sequence[str], plain: tokenizers.Tokenizer) -> bool:
    at, end = 0, plain.token_to_id("<|endoftext|>")
    for first in range(0, len(documents), BATCH):
        for each in plain.encode_batch(documents[first : first + BATCH], add_special_tokens=False):
            if row.read(at, len(each.ids) + 1).tolist() != [*each.ids, end]:
                return False
            at += len(each.ids) + 1
    return at == len(row)


def _add_rates(report: Report, sides: dict[str, list[float]], tokens: int, size: int) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in sides.items()}
    for name, seconds in medians.items():
        report.add(f"{name}_tokens_per_second", round(tokens / seconds), "tokens/s")
        report.add(f"{name}_megabytes_per_second", round(size / 1e6 / seconds, 3), "MB/s")
    for name in ("encode_batch", "encode_batch_fast"):
        # In turns: of each turn by itself, so that a busy moment of the machine meets both.
        ratios = [plain / ours for plain, ours in zip(sides[name], sides["ours"], strict=True)]
        report.add(f"ours_to_{name}", round(statistics.median(ratios), 4), "ratio")
    report.add("at_least_0.9_of_encode_batch", report.figures["ours_to_encode_batch"].value >= 0.9, "bool", True)


def _add_reading(report: Report, options: argparse.Namespace, data: DataConfig, file: Path, root: Path) -> None:
    """What reading tokens takes of nanoGPT's step for a CPU, which is a short one."""
    document: dict[str, Any] = nanogpt(Path(data.paths[0]), options.steps, options.seed)
    document["data"] = {**data.model_dump(mode="json"), "tokenizer": str(file), "tokenizer_vocabulary": None}
    document["model"]["vocabulary_size"] = VOCABULARY
    spec = parse_job_spec(document)
    torch.set_num_threads(1)
    comm = Comm(RankGrid(spec.layout), 0, torch.device("cpu"))
    trainer = Trainer(spec, comm, Reporter(lambda _: None), 1e12, Places(token_cache=root / "tokens"))
    trainer.restore(Resume())
    batches, length = trainer.batches, spec.model.sequence_length
    steps, whole, reads = [], [], []
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        trainer.train_step()
        steps.append(time.perf_counter() - began)
        began = time.perf_counter()
        batches.training(step + options.steps)
        whole.append(time.perf_counter() - began)
        starts = [batches.order.start(sample) for sample in batches.plan.samples(step + 2 * options.steps)]
        began = time.perf_counter()
        for start in starts:
            batches.corpus.read(start, length + 1)
        reads.append(time.perf_counter() - began)
    step_seconds = statistics.median(steps)
    report.add("step", round(1e3 * step_seconds, 3), "ms")
    report.add("reading_tokens_of_a_step", round(1e6 * statistics.median(reads), 1), "us")
    report.add("reading_tokens_to_step", round(statistics.median(reads) / step_seconds, 6), "ratio", 0.001)
    report.add("making_a_batch_to_step", round(statistics.median(whole) / step_seconds, 6), "ratio")
    trainer.close()


if __name__ == "__main__":
    sys.exit(main())
