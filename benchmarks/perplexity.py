"""A Llama trained from text under several layouts, and by `transformers` and plain PyTorch on the same samples in the
same order: perplexity of each on a text that none of them has seen.

All begin with the same random weights, a folder in Hugging Face's format. The tokens are those of a byte-pair encoding
trained on the training text. In fp32 each layout is started as a user would, by torchrun, and the engine measures its
perplexity itself; the weights of one of them are exported too, for `transformers` to measure. A smaller model is
trained in fp64, where only rounding is left between layouts.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.hugging_face import llama_like
from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import ROOT, Report, deliver, parser
from benchmarks.support.transformers_loop import TransformersLoop
from workers.comm.comm import Comm
from workers.config import JobSpec
from workers.data.batches import Batches, MicroBatch
from workers.engine import Engine
from workers.errors import DataError, MantaError
from workers.learning_rate import learning_rate
from workers.metric_names import VALIDATION_LOSS
from workers.spec.reading import parse_job_spec
from workers.validation import Validation
from workers.weights.reading import Weights
from workers.weights.submitted import with_shape_of_weights

TEXTS = ROOT.parent / "shared" / "data"
VOCABULARY = 8192
HEADS = {"layers": 8, "heads": 8, "kv_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "10m": {**HEADS, "hidden_size": 256, "ffn_hidden_size": 704, "tie_embeddings": False},
    "1m": {**HEADS, "hidden_size": 64, "ffn_hidden_size": 256, "tie_embeddings": True},
}
"""10.1 and 1.0 million parameters."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tensor2_pipeline2_data2": {"tensor": 2, "pipeline": 2, "data": 2},
    "pipeline4_interleaved": {"pipeline": 4, "virtual_stages": 2, "schedule": "interleaved", "recompute": "full"},
    "tensor2_zero_bubble": {"tensor": 2, "pipeline": 2, "virtual_stages": 2, "schedule": "zb-v"},
}
EXPORTED = "tensor2_pipeline2_data2"
MOST_APART = {"fp32": 1e-3, "fp64": 1e-8}
"""Between layouts, relative to the perplexity."""
MOST_FROM_TRANSFORMERS = 5e-3
SEQUENCE, BATCH, RATE = 64, 4, 3e-4
"""At a rate of 1e-3 batches as small as these make the training chaotic: weights that are 1e-7 apart at the start are
2e-2 apart after 128 steps, at this one 3e-7."""
SECONDS = 4 * 3600.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("perplexity", __doc__)
    options.add_argument("--train", type=Path, default=TEXTS / "wikitext2-valid.txt", help="text to learn from")
    options.add_argument("--test", type=Path, default=TEXTS / "wikitext2-test.txt", help="text to measure on")
    options.add_argument("--steps", type=int, default=1000, help="of each training (default: 1000)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Train all of them, one after the other. Raises DataError where a text is not there."""
    for text in (options.train, options.test):
        if not text.is_file():
            raise DataError(f"there is no text at {text}: name two with --train and --test")
    report = Report("perplexity", options.seed)
    with tempfile.TemporaryDirectory(prefix="perplexity-") as name:
        runs = Runs(Path(name), options)
        _in_fp32(report, runs)
        _in_fp64(report, runs)
    report.settings = {
        "shapes": SHAPES, "layouts": LAYOUTS, "vocabulary": VOCABULARY, "steps": options.steps,
        "sequence_length": SEQUENCE, "global_batch_size": BATCH, "learning_rate": RATE, "train": options.train.name,
        "test": options.test.name,
    }  # fmt: skip
    return report


def _in_fp32(report: Report, runs: Runs) -> None:
    losses: dict[str, float] = {}
    for layout in LAYOUTS:
        began = time.monotonic()
        losses[layout] = runs.by_torchrun("10m", layout)
        report.add(f"fp32_{layout}_perplexity", math.exp(losses[layout]), "perplexity")
        report.samples.setdefault("fp32_seconds", []).append(round(time.monotonic() - began, 1))
    report.add("fp32_most_apart", _apart(list(losses.values())), "ratio", MOST_APART["fp32"])
    plain, exported = runs.by_transformers("10m", runs.exported())
    report.add("fp32_transformers_perplexity", math.exp(plain), "perplexity")
    most = max(abs(math.expm1(loss - plain)) for loss in losses.values())
    report.add("fp32_most_from_transformers", most, "ratio", MOST_FROM_TRANSFORMERS)
    report.add("exported_from_own", abs(math.expm1(exported - losses[EXPORTED])), "ratio", 1e-5)


def _in_fp64(report: Report, runs: Runs) -> None:
    ranks, losses = LocalRanks(), {}
    for layout in LAYOUTS:
        document = runs.document("1m", layout)
        losses[layout] = ranks.run(_train_in_fp64, document, str(runs.cache), seconds=SECONDS)[0]
        report.add(f"fp64_{layout}_perplexity", math.exp(losses[layout]), "perplexity")
    report.add("fp64_most_apart", _apart(list(losses.values())), "ratio", MOST_APART["fp64"])


def _apart(losses: list[float]) -> float:
    """How far perplexities are from each other, relative to the smallest."""
    return math.expm1(max(losses) - min(losses))


class Runs:
    """The trainings of one benchmark, and the folder that they work in."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.options, self.cache = folder, options, folder / "tokens"
        for size in SHAPES:
            torch.manual_seed(options.seed)
            llama_like(parse_job_spec(self._job(size))).save_pretrained(folder / size)

    def _job(self, size: str) -> dict[str, Any]:
        steps = self.options.steps
        model = {"family": "llama", "sequence_length": SEQUENCE, "vocabulary_size": VOCABULARY, **SHAPES[size]}
        optimizer = {"learning_rate": RATE, "min_learning_rate": RATE / 10, "warmup_steps": min(50, steps // 2)}
        train = {"steps": steps, "global_batch_size": BATCH, "seed": self.options.seed, "optimizer": optimizer}
        # More batches than there are: all that the text gives, once.
        test = {"batches": 10**6, "name": "test", "source": "text", "paths": [str(self.options.test.absolute())]}
        data = {
            "source": "text", "paths": [str(self.options.train.absolute())], "validation_fraction": 0.0,
            "tokenizer": "bpe", "tokenizer_vocabulary": VOCABULARY, "validation": [test],
        }  # fmt: skip
        # Each rank computes alike in all layouts, and as the plain loop does.
        resources = {"threads": 1}
        return {"model": model, "data": data, "train": {**train, "validate_every": steps}, "resources": resources}

    def document(self, size: str, layout: str) -> dict[str, Any]:
        """The job of a size that begins with the random weights."""
        model = {"from": str(self.folder / size), "sequence_length": SEQUENCE}
        return with_shape_of_weights({**self._job(size), "model": model, "parallel": LAYOUTS[layout]})

    def _batches(self, document: dict[str, Any]) -> Batches:
        alone = parse_job_spec({**document, "parallel": {}})
        return Batches(alone, 0, torch.device("cpu"), cache=self.cache)

    def by_torchrun(self, size: str, layout: str) -> float:
        """Loss on the test text after a training by the engine. Raises MantaError where that fails."""
        document, folder = self.document(size, layout), self.folder / layout
        folder.mkdir()
        document["checkpoint"] = {"every_steps": self.options.steps}
        config, metrics = folder / "job.json", folder / "metrics.jsonl"
        config.write_text(json.dumps(document))
        world = parse_job_spec(document).layout.world_size
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
        options = ["--metrics", metrics, "--checkpoints", folder / "checkpoints", "--cache", self.cache]
        _run([sys.executable, *launcher, "-m", "workers.run", config, *options])
        return float(json.loads(metrics.read_text().splitlines()[-1])[f"{VALIDATION_LOSS}_test"])

    def exported(self) -> Path:
        """The weights of one of these trainings, in Hugging Face's format."""
        (checkpoint,) = (self.folder / EXPORTED / "checkpoints").glob("step-*")
        target = self.folder / "exported"
        _run([sys.executable, "-m", "workers.weights.export", checkpoint, "--to", target, "--dtype", "fp32"])
        return target

    def by_transformers(self, size: str, exported: Path) -> tuple[float, float]:
        """Losses on the test text, both by transformers: after a training by plain PyTorch; of exported weights."""
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # as each rank of the engine
        document = self.document(size, "alone")
        spec, batches = parse_job_spec(document), self._batches(document)
        model = AutoModelForCausalLM.from_pretrained(self.folder / size, dtype=torch.float32)
        trained = TransformersLoop(model.train(), spec.train.optimizer, spec.train.steps)
        for step in range(1, spec.train.steps + 1):
            trained.step(torch.cat([_tokens(batch) for batch in batches.training(step)]))
        other = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        held = TransformersLoop(other, spec.train.optimizer, spec.train.steps)
        return trained.mean_loss(_test_tokens(batches)), held.mean_loss(_test_tokens(batches))


def _tokens(batch: MicroBatch) -> torch.Tensor:
    """[b, s + 1] of a micro-batch."""
    assert batch.inputs_sb is not None and batch.targets_sb is not None
    return torch.cat([batch.inputs_sb, batch.targets_sb[-1:]]).t()


def _test_tokens(batches: Batches) -> Iterator[torch.Tensor]:
    (test,) = batches.held_out
    for number in range(test.batches(batches.spec)):
        yield torch.cat([_tokens(batch) for batch in batches.validation(test, number)])


def _train_in_fp64(comm: Comm, spec: JobSpec, cache: str) -> float:
    """Loss on the test text; the same on each rank."""
    engine = Engine(spec, comm, torch.float64)
    engine.begin_with(Weights(spec).fill)
    batches = Batches(spec, comm.index("data"), comm.device, engine.model.reads_tokens, cache=Path(cache))
    for step in range(1, spec.train.steps + 1):
        rate = learning_rate(spec.train.optimizer, step, spec.train.steps)
        engine.step(batches.training(step), spec.train.global_batch_size, rate, 0)
        engine.settle()
    comm.barrier()
    return Validation(engine, batches, comm).losses()[f"{VALIDATION_LOSS}_test"]


def _run(command: list[Any]) -> None:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MantaError(f"{' '.join(map(str, command[1:5]))} ended with {done.returncode}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
