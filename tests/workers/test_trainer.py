"""What a trainer owes a job beyond its steps."""

import gc
import itertools
import math
import shutil
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from engine_specs import spec
from reported import events_of, rows_of
from torch.multiprocessing.reductions import StorageWeakRef

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.engine import Engine
from manta.workers.errors import MantaError, NonFiniteError, RestRequested
from manta.workers.liveness import rank_samples
from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.liveness.rank_samples import Straggler, unpacked
from manta.workers.protocol.messages import Resume
from manta.workers.protocol.reports import Metrics
from manta.workers.protocol.requests import Rest, SaveAndEnd
from manta.workers.snapshot.files import stored_steps
from manta.workers.timing.step_phases import PARTS
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.bad_numbers import BadStep
from manta.workers.training.reporter import Reporter
from manta.workers.training.step_row import StepRows, Validation


def _trainer(job, places, progress=None):
    comm = Comm(RankGrid(job.layout), 0, torch.device("cpu"), progress=progress)
    comm.generation = 1
    return Trainer(job, comm, Reporter(lambda messages: None), 1e9, places)


def test_last_step_is_saved_even_if_a_rank_died_while_saving_it(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be or not to be, that is the question. " * 20, encoding="utf-8")
    job = spec(data={"paths": [str(corpus)]}, train={"steps": 2})
    places = StatePaths(snapshots=str(tmp_path / "shared"), checkpoints=str(tmp_path / "durable"))
    first = _trainer(job, places)
    first.restore(Resume())
    first.train()
    assert [manifest.step for _, manifest in complete_checkpoints(places.checkpoints)] == [2]
    shutil.rmtree(places.checkpoints)  # as if the process had died before the manifest

    second = _trainer(job, places)
    second.restore(Resume("snapshot", 2))
    second.train()
    assert [manifest.step for _, manifest in complete_checkpoints(places.checkpoints)] == [2]


def test_trainer_reports_once_that_micro_batches_cannot_be_recorded(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be or not to be, that is the question. " * 20, encoding="utf-8")
    job, messages = spec(data={"paths": [str(corpus)]}, train={"steps": 3, "cuda_graphs": True}), []
    reporter = Reporter(messages.extend)
    trainer = Trainer(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")), reporter, 1e9)
    trainer.restore(Resume())
    trainer.train_step()
    monkeypatch.setattr(Engine, "not_recorded", "RuntimeError: not permitted")
    trainer.train()
    reporter.close()
    (event,) = [each for each in events_of(messages) if each["type"] == "cuda_graph_not_recorded"]
    assert (event["step"], event["reason"]) == (2, "RuntimeError: not permitted")


def test_checkpoints_of_before_a_start_from_nothing_are_not_pruned(tmp_path, each_save_at_its_step):
    """Neither by the generation that began at step 0 nor by one that goes on from it."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be or not to be, that is the question. " * 20, encoding="utf-8")
    job = spec(data={"paths": [str(corpus)]}, train={"steps": 5}, checkpoint={"every_steps": 1, "keep": 1})
    places = StatePaths(snapshots=str(tmp_path / "shared"), checkpoints=str(tmp_path / "durable"))

    def made_by(generation, resume, steps):
        trainer = _trainer(job, places)
        trainer.comm.generation = generation
        trainer.restore(resume)
        trainer.train(stop_after_step=steps)
        trainer.close()
        return [(each.generation, each.step) for _, each in complete_checkpoints(places.checkpoints)]

    assert made_by(1, Resume(), 3) == [(1, 3)]
    assert made_by(2, Resume(), 2) == [(1, 3), (2, 2)]
    assert made_by(3, Resume("snapshot", 2, began=2), 4) == [(1, 3), (3, 4)]
    assert made_by(4, Resume("snapshot", 4, began=1), 5) == [(4, 5)]


def test_trainer_restarted_from_nothing_gives_the_bits_of_a_new_process(tmp_path):
    """A survivor whose peers' state cannot be had any more starts from nothing, moments included."""
    trainer = _trainer(_two_step_job(tmp_path), StatePaths())
    losses = []
    for _ in range(2):
        trainer.restore(Resume())
        losses.append([trainer.train_step().loss for _ in range(3)])
    assert losses[0] == losses[1]


def _two_step_job(tmp_path, **recovery):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be or not to be, that is the question. " * 20, encoding="utf-8")
    return spec(data={"paths": [str(corpus)]}, train={"steps": 3}, recovery=recovery)


def _poison(trainer):
    """Make the next loss not finite."""
    slot = next(slot for slot in trainer.engine.flat.slots if slot.entry.name == "final_norm.weight")
    trainer.engine.flat.parameters[slot.start] = float("inf")
    return trainer.engine.flat.parameters.clone()


def test_a_step_that_is_not_finite_fails_the_job_and_names_its_samples(tmp_path):
    trainer = _trainer(_two_step_job(tmp_path), StatePaths())
    trainer.restore(Resume())
    trainer.train_step()
    before = _poison(trainer)
    with pytest.raises(NonFiniteError, match=r"step 2 has loss nan .*samples 8 to 15.*nothing was updated"):
        trainer.train_step()
    assert trainer.step == 1
    assert torch.equal(trainer.engine.flat.parameters, before)


def test_a_step_that_is_not_finite_can_pass_without_an_update(tmp_path):
    messages = []
    job = _two_step_job(tmp_path, nonfinite="skip")
    comm = Comm(RankGrid(job.layout), 0, torch.device("cpu"))
    reporter = Reporter(messages.extend)
    trainer = Trainer(job, comm, reporter, 1e9, StatePaths())
    trainer.restore(Resume())
    trainer.train_step()
    good = trainer.engine.flat.parameters.clone()
    before = _poison(trainer)
    trainer.train_step()
    assert trainer.step == 2
    assert torch.equal(trainer.engine.flat.parameters, before)
    trainer.engine.flat.parameters.copy_(good)
    assert trainer.train_step().finite
    reporter.close()
    (event,) = events_of(messages)
    assert (event["type"], event["step"]) == ("step_skipped", 2)
    assert (event["first_sample"], event["last_sample"]) == (8, 15)
    losses = [row["loss"] for row in rows_of(messages)]
    assert [math.isfinite(loss) for loss in losses] == [True, False, True]


def test_skipped_update_continues_with_the_bits_of_a_restart(tmp_path):
    job = _two_step_job(tmp_path, nonfinite="skip")

    def after_three_steps(places, restarts):
        trainer = _trainer(job, places)
        trainer.restore(Resume())
        trainer.train_step()
        good = trainer.engine.flat.parameters.clone()
        _poison(trainer)
        trainer.train_step()
        trainer.state.finish_copies()
        trainer.engine.flat.parameters.copy_(good)
        if restarts:
            trainer.restore(Resume("snapshot", 2))
        trainer.train_step()
        trainer.close()
        return trainer.engine.flat.parameters

    went_on = after_three_steps(StatePaths(snapshots=str(tmp_path / "a")), restarts=False)
    assert torch.equal(went_on, after_three_steps(StatePaths(snapshots=str(tmp_path / "b")), restarts=True))


def test_trainer_step_times_exclude_time_before_the_steps(tmp_path, monkeypatch):
    """It is the start, or the recovery: a rank may have rested for long."""
    messages, now, job = [], [0.0], _two_step_job(tmp_path)
    reporter = Reporter(messages.extend)
    trainer = Trainer(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")), reporter, 1e9, StatePaths())
    monkeypatch.setattr(trainer.clock, "_clock", lambda: now[0])
    for step in (1, 2):
        trainer.restore(Resume("snapshot" if step > 1 else "start", step - 1))
        now[0] += 1000.0
        trainer.train(stop_after_step=step)
    reporter.close()
    assert [row["seconds"]["wall"] for row in rows_of(messages)] == [0.0, 0.0]


def test_step_time_and_rates_leave_out_the_validation_of_the_step(tmp_path, monkeypatch):
    """By a clock that moves by an hour with each validation, and not otherwise."""
    now = [100.0]
    monkeypatch.setattr("manta.workers.trainer.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def losses(_validation):
        now[0] += 3600.0
        return {}

    monkeypatch.setattr(Validation, "losses", losses)
    job = _two_step_job(tmp_path)
    job = job.model_copy(update={"train": job.train.model_copy(update={"validate_every": 1})})
    trainer = _trainer(job, StatePaths())
    trainer.restore(Resume())
    seconds = []
    monkeypatch.setattr(StepRows, "row", lambda *values: seconds.append(values[-1]) or {})
    trainer.train_step()
    assert seconds == [0.0] and now[0] == 3700.0


def test_every_kth_metrics_row_has_the_parts_of_the_step_time(tmp_path):
    messages = []
    job = _two_step_job(tmp_path).model_copy(deep=True)
    job = job.model_copy(update={"train": job.train.model_copy(update={"time_parts_every": 2})})
    reporter = Reporter(messages.extend)
    trainer = Trainer(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")), reporter, 1e9, StatePaths())
    trainer.restore(Resume())
    trainer.train()
    reporter.close()
    rows = rows_of(messages)
    assert [("forward_seconds" in row) for row in rows] == [False, True, False]
    parts = {name: value for name, value in rows[1].items() if name.endswith("_seconds") and name != "step_seconds"}
    assert set(parts) == {f"{part}_seconds" for part in (*PARTS, "snapshot")} - {
        f"{part}_seconds" for part in ("context_communication", "dispatch", "combine")
    }
    assert 0 < sum(parts.values()) <= rows[1]["step_seconds"]


def test_the_snapshot_of_a_step_is_whole_before_the_next_update_and_only_then(tmp_path):
    """Held up until the next step asks for it, the copy is still that of the step before."""
    trainer = _trainer(_two_step_job(tmp_path), StatePaths(snapshots=str(tmp_path / "shared")))
    trainer.restore(Resume())
    trainer.train_step()
    committed = [tensor.clone() for tensor in trainer.engine.state()]
    trainer.state.snapshots.finish()
    trainer.state.snapshots.clear()
    unprotect, finish = threading.Event(), trainer._before_update
    seen = []

    def before_update():
        assert all(torch.equal(now, then) for now, then in zip(trainer.engine.state(), committed, strict=True))
        seen.append(stored_steps(tmp_path / "shared", 0))
        unprotect.set()
        finish()
        seen.append(stored_steps(tmp_path / "shared", 0))

    trainer._before_update = before_update
    trainer.state.snapshots._copier._thread.submit(unprotect.wait, 30)
    trainer.state.snapshots.start(1)
    trainer.train_step()
    assert seen == [[], [1]]
    loaded = _trainer(trainer.spec, StatePaths(snapshots=str(tmp_path / "shared")))
    loaded.state.snapshots.load(1)
    assert all(torch.equal(now, then) for now, then in zip(loaded.engine.state(), committed, strict=True))


def _rows(job, places):
    messages = []
    reporter = Reporter(messages.extend)
    trainer = Trainer(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")), reporter, 1e9, places)
    trainer.restore(Resume())
    trainer.train()
    reporter.close()
    return rows_of(messages), trainer.engine.state()


def test_snapshots_change_no_bit_and_their_cost_is_in_every_row(tmp_path, monkeypatch):
    """By a clock that moves by a microsecond whenever a snapshot looks at it."""
    looks = itertools.count()
    for module in ("snapshots", "state_copy"):
        clock = SimpleNamespace(perf_counter=lambda: next(looks) * 1e-6)
        monkeypatch.setattr(f"manta.workers.snapshot.{module}.time", clock)
    job = _two_step_job(tmp_path)
    (plain, state), (kept, kept_state) = (
        _rows(job, StatePaths()),
        _rows(job, StatePaths(snapshots=str(tmp_path / "shared"))),
    )
    assert [row["loss"] for row in plain] == [row["loss"] for row in kept]
    assert all(torch.equal(a, b) for a, b in zip(state, kept_state, strict=True))
    assert [row["step"] for row in kept] == [1, 2, 3], "each once, in order"
    assert [row["snapshot_every_steps"] for row in kept] == [1, 1, 1]
    assert all(0 < row["snapshot_stall_seconds"] < row["seconds"]["wall"] for row in kept[1:])
    assert "snapshot_every_steps" not in plain[0]
    assert stored_steps(tmp_path / "shared", 0) == [2, 3]


def test_a_number_of_steps_between_snapshots_is_kept_to(tmp_path):
    job = _two_step_job(tmp_path)
    every = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"snapshot_every_steps": 2})})
    rows, _ = _rows(every, StatePaths(snapshots=str(tmp_path / "shared")))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert stored_steps(tmp_path / "shared", 0) == [0, 2]


def test_record_and_statistics_tell_where_the_step_was_spent(tmp_path):
    trainer = _trainer(_two_step_job(tmp_path), StatePaths(), Progress.shared(tmp_path, 0))
    trainer.restore(Resume())
    statistics = trainer.train_step()
    reader = ProgressReader(progress_path(tmp_path, 0))
    record = reader.read()
    assert (record.generation, record.committed, record.commits, record.waits_for) == (1, 1, 1, None)
    assert len(record.step_seconds) == 1
    assert 0.0 < statistics.own_seconds[0] <= record.own_seconds[0] == record.step_seconds[0]
    trainer.train()
    assert reader.read().phase == "done"
    reader.close()


def test_progress_record_keeps_step_times_measured_on_the_device(tmp_path, monkeypatch):
    trainer = _trainer(_two_step_job(tmp_path), StatePaths(), Progress.shared(tmp_path, 0))
    monkeypatch.setattr(Comm, "device_step_seconds", (8.0, 3.0))
    trainer.restore(Resume())
    trainer.train_step()
    reader = ProgressReader(progress_path(tmp_path, 0))
    record = reader.read()
    assert (record.step_seconds, record.own_seconds) == ((8.0,), (3.0,))
    reader.close()


@pytest.mark.parametrize("recovery", [{}, {"nonfinite": "roll_back"}])
@pytest.mark.parametrize("engine", [{}, {"recompute": "full"}, {"deterministic": "elastic"}])
def test_a_closed_trainer_is_freed_without_the_garbage_collector(tmp_path, recovery, engine):
    """A process that builds the model of another layout must not hold two of them until a collection happens to run."""
    job = _two_step_job(tmp_path, **recovery)
    section = "train" if "deterministic" in engine else "parallel"
    job = job.model_copy(update={section: getattr(job, section).model_copy(update=engine)})
    gc.collect()
    gc.disable()
    try:
        trainer = _trainer(job, StatePaths(snapshots=str(tmp_path / "shared"), checkpoints=str(tmp_path / "durable")))
        trainer.restore(Resume())
        trainer.train()
        tensors = [*trainer.engine.state(), trainer.engine.flat.gradients, trainer.engine.flat.parameters]
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        file, whole = weakref.ref(trainer.state.snapshots._file), weakref.ref(trainer)
        trainer.close()
        del trainer, tensors
        assert whole() is None
        assert all(storage.expired() for storage in storages), "its bytes are free as well"
        assert file() is None, "and the snapshot file is no longer mapped"
    finally:
        gc.enable()


def test_straggler_is_reported_by_rank_0_unless_stragglers_are_ignored(tmp_path):
    messages, given, job = [], [], _two_step_job(tmp_path)
    straggler = Straggler(1, 0.5, 0.2, 20)

    class Stragglers:
        named = (straggler,)

        def add(self, own_seconds, loads=None):
            given.append(own_seconds)
            return [straggler] if len(given) == 2 else []

    reporter = Reporter(messages.extend)
    trainer = Trainer(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")), reporter, 1e9, StatePaths())
    assert trainer._stragglers is not None
    trainer._stragglers = Stragglers()
    trainer.restore(Resume())
    steps = [trainer.train_step().own_seconds for _ in range(3)]
    reporter.close()
    assert given == steps
    (event,) = events_of(messages)
    assert (event["type"], event["step"], event["straggler"], event["slow_steps"]) == ("straggler", 2, 1, 20)
    assert event["message"] == straggler.sentence
    assert _trainer(_two_step_job(tmp_path, stragglers="ignore"), StatePaths())._stragglers is None


def test_numbers_of_all_ranks_are_reported_now_and_then_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_samples, "EVERY_SECONDS", 0.0)
    messages, job = [], _two_step_job(tmp_path)
    reporter = Reporter(messages.extend)
    trainer = Trainer(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")), reporter, 1e9, StatePaths())
    trainer.restore(Resume())
    statistics = trainer.train_step()
    reporter.close()
    (sample,) = [message.payload.ranks for message in messages if isinstance(message.payload, Metrics)]
    assert (sample.step, unpacked(sample.memory_bytes)) == (1, pytest.approx([statistics.memory_bytes], rel=1e-6))
    (own,) = unpacked(sample.own_seconds)
    assert own == pytest.approx(statistics.own_seconds[0], rel=1e-6)
    assert 0 < own <= sample.seconds < rows_of(messages)[0]["step_seconds"]


def _of_two(tmp_path, rank, **parallel):
    """A rank that has not met the other one."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be or not to be, that is the question. " * 20, encoding="utf-8")
    job = spec(data={"paths": [str(corpus)]}, parallel=parallel)
    comm = Comm(RankGrid(job.layout), rank, torch.device("cpu"))
    return Trainer(job, comm, Reporter(lambda messages: None), 1e9, StatePaths())


def test_trainer_counts_peak_flops_of_all_ranks_and_rank_0_reports_stragglers(tmp_path):
    first, second = (_of_two(tmp_path, rank, data=2) for rank in (0, 1))
    assert first._rows.peak_flops == second._rows.peak_flops == 2e9
    assert first._stragglers is not None and second._stragglers is None


def test_stragglers_are_compared_with_ranks_of_their_stage(tmp_path):
    assert _of_two(tmp_path, 0, data=2)._stragglers._stages == [[0, 1]]
    assert _of_two(tmp_path, 0, pipeline=2)._stragglers._stages == [[0], [1]]


def test_trainer_asked_to_rest_does_so_between_steps(tmp_path):
    trainer = _trainer(_two_step_job(tmp_path), StatePaths())
    trainer.restore(Resume())
    trainer.state.commit = _then(trainer.state.commit, lambda step, _: step == 1 and trainer.comm.requests.add(Rest(1)))
    with pytest.raises(RestRequested):
        trainer.train()
    assert trainer.settled_step == trainer.step == 2, "it was asked after the first step's agreement"


def test_trainer_asked_to_rest_after_its_last_step_is_done(tmp_path):
    last = _trainer(_two_step_job(tmp_path), StatePaths())
    last.restore(Resume())
    last.comm.requests.add(Rest(1))
    last.train(stop_after_step=1)
    assert (last.step, last.ends_early) == (1, False)
    both = _trainer(_two_step_job(tmp_path), StatePaths())
    both.restore(Resume())
    both.comm.requests.add(Rest(1))
    both.comm.requests.add(SaveAndEnd(1))
    both.train()
    assert (both.step, both.ends_early) == (1, True)


def _then(function, more):
    """`function`, and `more` of the same arguments after it."""

    def both(*arguments):
        answer = function(*arguments)
        more(*arguments)
        return answer

    return both


@pytest.mark.parametrize(("every", "compared"), [(0, []), (1, [1, 2, 3]), (2, [2])])
def test_replicas_are_compared_before_the_update_of_every_so_many_steps(tmp_path, every, compared):
    trainer, steps = _trainer(_two_step_job(tmp_path, check_replicas_every=every), StatePaths()), []
    trainer._compare_replicas = lambda: steps.append(trainer.step + 1)
    trainer.restore(Resume())
    trainer.train()
    assert steps == compared


@pytest.mark.parametrize(("kind", "key"), [("not_finite", "recovery.nonfinite"), ("spike", "recovery.spike.policy")])
def test_job_failing_over_a_bad_step_names_the_setting_to_change(tmp_path, kind, key):
    trainer = _trainer(_two_step_job(tmp_path), StatePaths())
    trainer.restore(Resume())
    with pytest.raises(MantaError, match=f"set {key} to skip or roll_back"):
        trainer._apply_policy(1, BadStep(kind, "fail", "step 1 is bad"))
