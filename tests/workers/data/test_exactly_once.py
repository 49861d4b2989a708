"""Over a whole job each sample is trained on exactly once, whatever happens between its steps: each token of the corpus
says where it lies, and what all replicas are given in every step is counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from engine_specs import spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron_files import megatron_dataset
from tokenizer_files import byte_level

from manta.workers.data.batches import NO_TARGET, Batches
from manta.workers.data.tokenizer import FileTokenizer

CPU, LENGTH, BATCH = torch.device("cpu"), 8, 6
FIRST, SIZES, WEIGHTS = (1000, 3000), (401, 163), (2, 1)
WINDOWS = [(size - 1) // LENGTH - 1 for size in SIZES]
MODEL = {"vocabulary_size": 4000, "sequence_length": LENGTH}
STEPS = 50
"""Both parts are begun anew within them: they take 200 and 100 samples."""

LAYOUTS = [(replicas, micro) for micro in (1, 2, 3) for replicas in range(1, BATCH // micro + 1)]
"""(replicas, samples in a micro-batch)."""

changes = st.lists(st.tuples(st.integers(1, STEPS), st.sampled_from(LAYOUTS)), max_size=6)
"""Steps with which generations begin, and their layouts: after a failure, a resize, a continuation."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[dict, int, Path]:
    """Two datasets of documents of 20 tokens; the last of each is the one that ends documents, all others are unique.
    Also that token, and a folder for what is kept."""
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer = byte_level(folder / "tokenizer.json")
    end = FileTokenizer(str(tokenizer)).end_of_document
    for name, first, size in zip("ab", FIRST, SIZES, strict=True):
        row = [end if n % 20 == 19 else first + n for n in range(size)]
        megatron_dataset(folder / name, [[row[at : at + 20]] for at in range(0, size, 20)])
    data = {
        "source": "megatron", "paths": [str(folder / name) for name in "ab"], "weights": list(WEIGHTS),
        "tokenizer": str(tokenizer), "documents": "apart", "validation_fraction": 0.0,
    }  # fmt: skip
    return data, end, folder


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes, st.sampled_from(["layout", "elastic"]))
def test_each_sample_is_trained_on_once_an_epoch_over_generations_of_any_layout(corpus, changes, deterministic):
    data, end, folder = corpus
    windows: tuple[list[int], list[int]] = ([], [])
    taught: Counter[int] = Counter()
    for first, last, replicas, micro in generations(changes):
        train = {"global_batch_size": BATCH, "micro_batch_size": micro, "deterministic": deterministic}
        job = spec(
            data=data,
            train=train,
            parallel={"data": replicas},
            model={"vocabulary_size": 4000, "sequence_length": LENGTH},
        )
        ranks = [Batches(job, replica, CPU, cache=folder / "cache") for replica in range(replicas)]
        for step in range(first, last + 1):
            for batch in (batch for rank in ranks for batch in rank.training(step)):
                for inputs, targets in zip(batch.inputs_sb.t().tolist(), batch.targets_sb.t().tolist(), strict=True):
                    part, start = where(inputs, end)
                    windows[part].append(start)
                    taught.update(target for target in targets if target != NO_TARGET)
    assert [len(part) for part in windows] == [200, 100]
    for part, starts in enumerate(windows):
        # Which steps an epoch has does not depend on the layout, but within a step replicas come one after the other.
        each = Counter(starts)
        whole, begun = divmod(len(starts), WINDOWS[part])
        offsets = Counter(start % LENGTH for start in starts)
        assert sum(offsets.values()) == len(starts)
        assert len(offsets) <= whole + bool(begun), "one offset an epoch"
        assert max(each.values()) <= whole + bool(begun)
        for offset, count in offsets.items():
            once = [number for start, number in each.items() if start % LENGTH == offset]
            assert sum(once) == count
            assert max(once) - min(once) <= 1, "no window before all others have had their turn"
            assert count < WINDOWS[part] or len(once) == WINDOWS[part], "and none is left out"
    assert taught == taught_by_one_process(data, folder)


def generations(changes):
    """(first step, last step, replicas, samples in a micro-batch) of each generation."""
    begins = {1: (1, 1)} | dict(changes)
    starts = sorted(begins)
    for first, following in zip(starts, [*starts[1:], STEPS + 1], strict=True):
        yield first, following - 1, *begins[first]


def where(tokens: list[int], end: int) -> tuple[int, int]:
    """The part of the corpus that a window is from, and its first token there."""
    at = next(n for n, token in enumerate(tokens) if token != end)
    part = int(tokens[at] >= FIRST[1])
    start = tokens[at] - at - FIRST[part]
    row = [end if n % 20 == 19 else FIRST[part] + n for n in range(start, start + LENGTH)]
    assert tokens == row, "a window is a piece of its part"
    return part, start


def taught_by_one_process(data: dict, folder: Path) -> Counter[int]:
    """How often each token is a target of a job that nothing happens to."""
    job = spec(data=data, train={"global_batch_size": BATCH, "micro_batch_size": BATCH}, model=MODEL)
    alone = Batches(job, 0, CPU, cache=folder / "cache")
    taught: Counter[int] = Counter()
    for step in range(1, STEPS + 1):
        (batch,) = alone.training(step)
        taught.update(batch.targets_sb[batch.targets_sb != NO_TARGET].tolist())
    return taught
