"""The plain loop as a program: `python -m benchmarks.support.plain_process TEXT STEPS`, with nanoGPT's settings.

It imports, reads, trains and prints as such a script does, with as many threads as torch takes by itself.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.support.jobs import nanogpt
from benchmarks.support.plain_gpt import PlainGPT, PlainLoop
from manta.workers.data.batches import MicroBatch
from manta.workers.spec.reading import parse_job_spec
from manta.workers.training.learning_rate import learning_rate


def main(text: Path, steps: int) -> None:
    """Train, and print each iteration's loss and time."""
    characters, tokens = np.unique(np.fromfile(text, dtype=np.uint8), return_inverse=True)
    document = nanogpt(text, steps, seed=1234)
    spec = parse_job_spec(document)
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"vocabulary_size": len(characters)})})
    loop = PlainLoop(spec, dict(PlainGPT(spec).named_parameters()))
    training, length = torch.from_numpy(tokens)[: int(0.9 * len(tokens))], spec.model.sequence_length
    before = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(training) - length, (spec.train.global_batch_size,))
        windows = torch.stack([training[start : start + length + 1] for start in starts.tolist()], 1)
        batch = MicroBatch(range(0), windows[:-1], windows[1:])
        loss = loop.step(batch, learning_rate(spec.train.optimizer, step, steps))
        now = time.perf_counter()
        print(f"iter {step}: loss {loss:.4f}, time {1e3 * (now - before):.2f}ms", flush=True)
        before = now


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
