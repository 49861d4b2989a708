"""Batches, read ahead."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_specs import spec

from manta.workers.data.batches import Batches, Prefetch
from manta.workers.data.order import SkippedSamples
from manta.workers.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture
def corpus(tmp_path) -> dict:
    """1000 bytes that say where they are, 100 of them held out."""
    path = tmp_path / "corpus.bin"
    path.write_bytes(bytes(n % 251 for n in range(1000)))
    return {"paths": [str(path)], "validation_fraction": 0.1}


def whole(corpus: dict, data: int, micro: int, step: int, validation: bool = False) -> torch.Tensor:
    """The global batch [B, s + 1] put together from all replicas' micro-batches."""
    job = spec(data=corpus, train={"micro_batch_size": micro, "validate_every": 1}, parallel={"data": data})
    rows = []
    for replica in range(data):
        batches = Batches(job, replica, CPU)
        for part in batches.validation(batches.held_out[0], step) if validation else batches.training(step):
            assert part.inputs_sb.shape == part.targets_sb.shape == (8, micro)
            assert torch.equal(part.inputs_sb[1:], part.targets_sb[:-1]), "targets are the tokens that follow"
            rows.append(torch.cat([part.inputs_sb, part.targets_sb[-1:]]).t())
    return torch.cat(rows)


@pytest.mark.parametrize(("data", "micro"), [(2, 1), (4, 2), (1, 8), (8, 1)])
@pytest.mark.parametrize("step", [1, 2, 40])
def test_batches_do_not_depend_on_the_layout(corpus, data, micro, step):
    assert torch.equal(whole(corpus, data, micro, step), whole(corpus, 1, 1, step))
    assert torch.equal(whole(corpus, data, micro, 0, True), whole(corpus, 1, 1, 0, True))


def test_ranks_that_share_samples_have_their_runs_of_tokens_and_targets(corpus):
    jobs = [spec(data=corpus, parallel={"context": 2, "context_order": order}) for order in ("zigzag", "contiguous")]
    (all_of_it, *_) = Batches(spec(data=corpus), 0, CPU).training(3)
    for job, runs in zip(jobs, ([[0, 1, 6, 7], [2, 3, 4, 5]], [[0, 1, 2, 3], [4, 5, 6, 7]]), strict=True):
        for context, rows in enumerate(runs):
            (part, *_) = Batches(job, 0, CPU, context=context).training(3)
            assert part.samples == all_of_it.samples
            assert torch.equal(part.inputs_sb, all_of_it.inputs_sb[rows])
            assert torch.equal(part.targets_sb, all_of_it.targets_sb[rows])


def test_batches_of_a_step_begin_where_the_step_before_ended(corpus):
    job = spec(data=corpus)
    order = Batches(job, 0, CPU).order
    for step in (1, 2, 13):
        first = [row[0].item() for row in whole(corpus, 1, 1, step)]
        assert first == [order.start(8 * (step - 1) + i) % 251 for i in range(8)]


def test_training_never_sees_the_held_out_part(corpus):
    batches = Batches(spec(data=corpus), 0, CPU)
    assert (batches.training_tokens, batches.validation_tokens) == (900, 100)
    assert max(batches.order.start(i) for i in range(5000)) + 9 <= 900


def test_validation_reads_the_held_out_part_in_order_and_again_from_its_start(corpus):
    first = whole(corpus, 1, 1, 0, validation=True)
    assert first[:, 0].tolist() == [(900 + 8 * i) % 251 for i in range(8)]
    second = whole(corpus, 1, 1, 1, validation=True)  # 12 windows in all
    assert second[:, 0].tolist() == [(900 + 8 * (i % 12)) % 251 for i in range(8, 16)]


def test_a_step_passes_over_skipped_samples_and_its_dropout_stays_that_of_its_places(corpus):
    job = spec(data=corpus, train={"micro_batch_size": 4, "seed": 7})
    batches = Batches(job, 0, CPU)
    assert batches.order.parts[0].seed == 7
    batches.skipped = SkippedSamples.of([range(3, 13)])
    used = [0, 1, 2, 13, 14, 15, 16, 17]
    parts = batches.training(1)
    first = [token for part in parts for token in part.inputs_sb[0].tolist()]
    assert first == [batches.order.start(sample) % 251 for sample in used]
    assert batches.samples(1) == [range(3), range(13, 18)]
    assert [part.samples for part in batches.training(2)] == [range(8, 12), range(12, 16)]


def test_pipeline_stages_between_first_and_last_get_batches_without_tokens(corpus):
    job = spec(data=corpus, train={"micro_batch_size": 4}, parallel={"data": 2})
    (part,) = Batches(job, 1, CPU, reads_tokens=False).training(2)
    assert (part.samples, part.inputs_sb, part.targets_sb) == (range(12, 16), None, None)


def test_only_the_recording_rank_writes_the_corpus_record_and_all_ranks_check_it(corpus, tmp_path):
    record = tmp_path / "record.json"
    Batches(spec(data=corpus), 0, CPU, record=record)
    assert not record.exists(), "another rank makes it"
    Batches(spec(data=corpus), 0, CPU, record=record, records=True)
    (tmp_path / "corpus.bin").write_bytes(bytes(999))
    with pytest.raises(DataError, match="has 999 bytes, and had 1000"):
        Batches(spec(data=corpus), 0, CPU, record=record)


@pytest.fixture
def job_with_sets(corpus, tmp_path):
    """A job with its own held-out text and two more."""

    def made(**train):
        for name, length in (("a.txt", 100), ("b.txt", 33)):
            (tmp_path / name).write_bytes(bytes(range(100, 100 + length)))
        sets = [
            {"name": "a", "paths": [str(tmp_path / "a.txt")]},
            {"name": "b", "paths": [str(tmp_path / "b.txt")], "batches": 2},
        ]
        return spec(data=corpus | {"validation": sets}, train={"validate_every": 1, "validation_batches": 8, **train})

    return made


def test_each_validation_set_is_read_from_its_own_text_under_its_own_metric(job_with_sets):
    batches = Batches(job_with_sets(global_batch_size=2), 0, CPU)
    assert [text.metric for text in batches.held_out] == ["validation_loss", "validation_loss_a", "validation_loss_b"]
    assert [text.batches(batches.spec) for text in batches.held_out] == [6, 6, 2]
    a, b = batches.held_out[1:]
    assert [part.inputs_sb[0].tolist() for part in batches.validation(a, 1)] == [[116], [124]]
    windows = [part.inputs_sb[:, 0].tolist() for part in batches.validation(b, 1)]
    assert windows == [[*range(116, 124)], [*range(124, 132)]], "of its own text, not of the corpus"


def test_validation_reads_only_named_sets_without_a_held_out_part_and_none_if_off(job_with_sets):
    job = job_with_sets()
    alone = job.model_copy(update={"data": job.data.model_copy(update={"validation_fraction": 0.0})})
    assert [text.metric for text in Batches(alone, 0, CPU).held_out] == ["validation_loss_a", "validation_loss_b"]
    never = job.model_copy(update={"train": job.train.model_copy(update={"validate_every": 0})})
    assert Batches(never, 0, CPU).held_out == ()


def test_validation_set_that_changed_since_the_job_began_is_refused(job_with_sets, tmp_path):
    job, record = job_with_sets(), tmp_path / "job" / "corpus.json"
    Batches(job, 0, CPU, record=record, records=True)
    assert sorted(file.name for file in record.parent.iterdir()) == [
        "corpus.json", "validation-a.json", "validation-b.json",
    ]  # fmt: skip
    (tmp_path / "b.txt").write_bytes(bytes(40))
    with pytest.raises(DataError, match=r"b\.txt has 40 bytes, and had 33 when the job began"):
        Batches(job, 0, CPU, record=record)


SECONDS = 60.0


class Watched(Batches):
    """Says which steps were read, by which thread."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.read: list[tuple[int, bool]] = []
        """Step, and whether another thread than the test's read it."""
        self.changed = threading.Condition()
        self.fails: set[int] = set()

    def training(self, step):
        beside = threading.current_thread() is not threading.main_thread()
        try:
            if step in self.fails:
                raise DataError(f"step {step} cannot be read")
            return super().training(step)
        finally:
            with self.changed:
                self.read.append((step, beside))
                self.changed.notify_all()

    def wait_for(self, step):
        """Return once `step` has been read beside the steps."""
        with self.changed:
            assert self.changed.wait_for(lambda: (step, True) in self.read, SECONDS)


@pytest.fixture
def batches(tmp_path):
    path = tmp_path / "corpus.bin"
    path.write_bytes(bytes(n % 251 for n in range(1000)))
    job = spec(data={"paths": [str(path)]}, parallel={"data": 2})
    return Watched(job, 1, torch.device("cpu"))


def of_its_own(batches, step):
    """What the step reads by itself."""
    return [part.inputs_sb.tolist() for part in Batches.training(batches, step)]


def asked_for(prefetch, step):
    return [part.inputs_sb.tolist() for part in prefetch.training(step)]


def test_next_step_is_prefetched_except_after_the_last_step(batches):
    prefetch = Prefetch(batches, 3)
    for step in (1, 2, 3):
        assert asked_for(prefetch, step) == of_its_own(batches, step)
        if step < 3:
            batches.wait_for(step + 1)
    prefetch.close()
    assert batches.read == [(1, False), (2, True), (3, True)]


def test_prefetch_returns_the_right_batches_for_steps_asked_out_of_order(batches):
    prefetch = Prefetch(batches, 100)
    for step in (1, 7, 7, 2, 3):
        assert asked_for(prefetch, step) == of_its_own(batches, step)
    prefetch.close()


def test_prefetched_step_is_read_again_after_samples_are_skipped(batches):
    prefetch = Prefetch(batches, 100)
    prefetch.training(1)
    batches.wait_for(2)
    before = of_its_own(batches, 2)
    batches.skipped = SkippedSamples.of([range(8, 24)])
    after = asked_for(prefetch, 2)
    assert after == of_its_own(batches, 2) != before
    prefetch.close()


def test_prefetch_that_fails_fails_only_the_step_that_needs_it(batches):
    prefetch = Prefetch(batches, 100)
    batches.fails = {2}
    prefetch.training(1)
    batches.wait_for(2)
    with pytest.raises(DataError, match="step 2 cannot be read"):
        prefetch.training(2)
    assert asked_for(prefetch, 3) == of_its_own(batches, 3)
    prefetch.close()
