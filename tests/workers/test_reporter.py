"""What a rank reports: rows of steps, events, files of metrics."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from engine_specs import layout_of, spec

from manta.workers.accounting.flops import step_flops
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.data.batch_plan import BatchPlan
from manta.workers.errors import MantaError
from manta.workers.liveness.progress import Progress
from manta.workers.liveness.rank_samples import RankSample, packed
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.parallel.experts.balance import has_losses
from manta.workers.protocol.reports import Event, Finished, Message, Metrics, Resting, Started
from manta.workers.standalone import MetricsFile
from manta.workers.timing.step_phases import StepPhases
from manta.workers.training import metric_names
from manta.workers.training import reporter as module
from manta.workers.training.log_lines import LogLines
from manta.workers.training.reporter import Reporter, announce, named_samples, sample_data
from manta.workers.training.step_row import StepRows, mean_part_seconds, memory_in_use


class Listener:
    """Takes what is shipped."""

    def __init__(self, seconds=0.0):
        self.batches, self._seconds, self.heard = [], seconds, threading.Event()

    def __call__(self, messages):
        time.sleep(self._seconds)
        self.batches.append([message.payload for message in messages])
        self.heard.set()

    @property
    def payloads(self):
        return [payload for batch in self.batches for payload in batch]


def test_reporter_has_delivered_everything_when_it_is_closed(monkeypatch):
    """The process ends right after that, and so does a thread that still ships."""
    monkeypatch.setattr(module, "BATCH_SECONDS", 1000.0)
    listener = Listener(seconds=0.02)
    reporter = Reporter(listener)
    rows = [{"step": step} for step in range(1, 6)]
    for row in rows:
        reporter.metrics(row)
    reporter.event("told", 5, "something happened", {"a": 1})
    reporter.send(Finished(5))
    reporter.close()
    expected = [*(Metrics((row,)) for row in rows), Event("told", "something happened", 5, {"a": 1}), Finished(5)]
    assert listener.payloads == expected
    assert not reporter._thread.is_alive(), "and nobody has waited for the time to be over"


def test_reporter_builds_slow_messages_on_its_own_thread_in_order():
    listener, made_by = Listener(), []

    def make():
        made_by.append(threading.current_thread().name)
        return Finished(2)

    reporter = Reporter(listener)
    reporter.metrics({"step": 1})
    reporter.deferred(make)
    reporter.send(Finished(3))
    reporter.close()
    assert listener.payloads == [Metrics(({"step": 1},)), Finished(2), Finished(3)]
    assert made_by == ["reporter"]


def test_reporter_skips_a_message_that_cannot_be_built(capfd):
    """A recovery waits for what a rank says last, and kills one that says nothing."""

    def fail():
        raise OSError(28, "No space left on device")

    listener = Listener()
    reporter = Reporter(listener)
    reporter.metrics({"step": 1})
    reporter.deferred(fail)
    reporter.send(Finished(2))
    reporter.close()
    assert listener.payloads == [Metrics(({"step": 1},)), Finished(2)]
    assert "No space left on device" in capfd.readouterr().err


def test_reporter_ships_urgent_messages_without_waiting_for_a_batch(monkeypatch):
    monkeypatch.setattr(module, "BATCH_SECONDS", 1000.0)
    listener = Listener()
    reporter = Reporter(listener)
    reporter.metrics({"step": 1})
    assert listener.heard.wait(20)
    listener.heard.clear()
    for step in (2, 3):
        reporter.metrics({"step": step})
    reporter.send(Finished(3))
    assert listener.heard.wait(20)
    reporter.close()
    assert not reporter._thread.is_alive(), "nor does its end"
    assert listener.payloads[-1] == Finished(3)
    assert len(listener.batches) <= 3, "what came meanwhile is one batch"


def test_reporter_batches_rows_again_after_an_urgent_message(monkeypatch):
    monkeypatch.setattr(module, "BATCH_SECONDS", 0.0)
    urgent, heard = [], threading.Event()

    def sink(messages):
        urgent.append(reporter._urgent.is_set())
        heard.set()

    reporter = Reporter(sink)
    reporter.send(Finished(1))
    assert heard.wait(20)
    heard.clear()
    reporter.metrics({"step": 2})
    assert heard.wait(20)
    assert urgent[1] is False
    reporter.close()


def test_messages_have_the_time_they_were_made_at(monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda: 100.0)
    shipped, hold = [], threading.Event()

    def sink(messages):
        shipped.extend(messages)
        assert hold.wait(20)

    reporter = Reporter(sink)
    reporter.send(Finished(1))
    reporter.send(Finished(2))
    monkeypatch.setattr(module.time, "time", lambda: 200.0)
    hold.set()
    reporter.close()
    assert [message.time for message in shipped] == [100.0, 100.0]


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError])
def test_reporter_thread_ends_when_its_listener_is_gone(error):
    def gone(messages):
        raise error

    reporter = Reporter(gone)
    reporter.metrics({"step": 1})
    reporter._thread.join(20)
    assert not reporter._thread.is_alive(), "not even until it is closed"
    reporter.close()


def test_reporter_waits_for_a_stuck_listener_no_longer_than_asked():
    hold = threading.Event()
    reporter = Reporter(lambda messages: hold.wait(20))
    reporter.send(Finished(1))
    reporter.close(timeout=0.01)
    assert reporter._thread.is_alive()
    assert reporter._thread.daemon, "nor for longer than the process has anything else to do"
    hold.set()


def test_reporter_attaches_rank_samples_to_the_next_row_only():
    listener = Listener()
    reporter = Reporter(listener)
    sample = RankSample(1, 0.1, None, packed([1.0]))
    reporter.ranks(sample)
    reporter.metrics({"step": 1})
    reporter.metrics({"step": 2})
    reporter.close()
    assert listener.payloads == [Metrics(({"step": 1},), sample), Metrics(({"step": 2},))]


SAMPLES = [range(8, 16), range(20, 21)]


def test_announcement_is_made_by_rank_0_alone():
    events = []
    reporter = SimpleNamespace(event=lambda *arguments: events.append(arguments))
    for rank in (0, 1):
        announce(SimpleNamespace(rank=rank), reporter, "spike", 3, "too high", {"a": 1})
    assert events == [("spike", 3, "too high", {"a": 1})]


def test_skipped_samples_are_named_inclusively_in_text_and_half_open_in_data():
    assert named_samples(SAMPLES) == "8 to 15 and 20 to 20"
    assert sample_data(SAMPLES) == {"first_sample": 8, "last_sample": 20, "samples": [[8, 16], [20, 21]]}


def test_metric_names_of_a_job_include_its_validation_sets_and_z_loss():
    sets = [{"name": name, "paths": ["a.txt"]} for name in ("b", "a_2")]
    job = spec(data={"validation": sets}, train={"validate_every": 5, "z_loss": 1e-4})
    document = job.model_dump(mode="json")
    assert metric_names.of_job(document) == ("validation_loss_b", "validation_loss_a_2", "z_loss")
    assert metric_names.of_job(spec().model_dump(mode="json")) == ()


@pytest.mark.parametrize(
    ("moe", "has_loss"),
    [
        ({}, True),
        ({"balance": {"loss": "none"}}, False),
        ({"balance": {"weight": 0.0}}, False),
        ({"balance": {"loss": "none"}, "router_z_loss": 0.1}, True),
    ],
)
def test_metric_names_of_a_job_with_experts_include_the_losses_that_its_routers_have(moe, has_loss):
    job = spec(model={"family": "llama", "moe": {"experts": 4, "per_token": 2, "ffn_hidden_size": 8} | moe})
    assert metric_names.of_job(job.model_dump(mode="json")) == ("expert_load", "balance_loss")[: 1 + has_loss]
    assert has_losses(job.model) == has_loss


@pytest.mark.parametrize(
    "stored",
    [{}, {"data": None, "train": 5}, {"data": {"validation": {"a": 1}}}, {"data": {"validation": [None, {"name": 3}]}}],
    ids=str,
)
def test_metric_names_of_a_malformed_stored_spec_are_empty(stored):
    assert metric_names.of_job(stored) == ()


CPU = torch.device("cpu")


def test_a_row_counts_the_tokens_and_the_work_of_its_own_step():
    """The third step of a ramp: 4, 4, 6, then 8 sequences of 8 tokens."""
    job = spec(
        model={"kv_heads": 1},
        train={"batch_ramp": {"start": 4, "increment": 2, "samples": 12}},
        parallel={"tensor": 2, "recompute": "full"},
    )
    flops = step_flops(job, sequences=6)
    kinds = (flops.model_full, flops.model_causal, flops.hardware_full, flops.hardware_paper)
    assert len(set(kinds)) == 4, "no figure can stand in for another"
    rows = StepRows(job, BatchPlan(job.train), peak_flops=1e9)
    row = rows.row(3, StepStatistics(loss=2.5, grad_norm=0.5, memory_bytes=77), learning_rate=1e-3, seconds=0.5)
    assert row == {
        "step": 3, "loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens": (4 + 4 + 6) * 8,
        "tokens_per_second": 6 * 8 / 0.5, "step_seconds": 0.5, "mfu_full": flops.model_full / 0.5e9,
        "mfu_causal": flops.model_causal / 0.5e9, "hfu_full": flops.hardware_full / 0.5e9,
        "hfu_paper": flops.hardware_paper / 0.5e9, "memory_bytes": 77,
    }  # fmt: skip


def test_step_row_has_a_z_loss_only_if_there_is_one():
    job = spec(train={"z_loss": 1e-4})
    rows = StepRows(job, BatchPlan(job.train), peak_flops=1e9)
    with_it = rows.row(1, StepStatistics(2.5, 0.5, 77, z_loss=0.003), learning_rate=1e-3, seconds=0.5)
    without = rows.row(1, StepStatistics(2.5, 0.5, 77), learning_rate=1e-3, seconds=0.5)
    assert with_it == without | {"z_loss": 0.003}


def test_step_row_has_no_utilisation_for_a_model_of_unknown_flops():
    job = spec(model={"family": "custom", "entrypoint": "theirs:build"})
    row = StepRows(job, BatchPlan(job.train), peak_flops=1e9).row(1, StepStatistics(2.5, 0.5, 77), 1e-3, seconds=0.5)
    assert not [name for name in row if name.startswith(("mfu", "hfu"))]
    assert row["loss"] == 2.5


def test_the_time_of_the_parts_is_their_mean_over_ranks(monkeypatch):
    """The other rank has spent one second more on each part."""
    now = [0.0]
    comm = Comm(RankGrid(layout_of(data=2)), 0, CPU)
    comm.step = StepPhases(CPU, Progress(), lambda: now[0])
    monkeypatch.setattr(comm, "all_reduce", lambda axis, values: values.mul_(2.0).add_(1.0))
    comm.step.begin(1, measure=True)
    with comm.step.phase("forward"):
        now[0] += 4.0
    means = mean_part_seconds(comm, snapshot_seconds=2.0)
    assert (means["forward_seconds"], means["snapshot_seconds"], means["bubble_seconds"]) == (4.5, 2.5, 0.5)
    assert not comm.step.parts.measuring, "the measurement is over"


def test_cpu_memory_in_use_is_resident_memory():
    assert memory_in_use(CPU) == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


LINES = LogLines(steps=9, every=1)
ROW = {
    "step": 2, "loss": float("nan"), "grad_norm": 0.5, "learning_rate": 3e-4, "tokens_per_second": 4196.6,
    "mfu_full": 0.312, "memory_bytes": 286.4 * 2**20, "generation": 2,
}  # fmt: skip


def rows_of(path: Path) -> list[dict]:
    """The rows in the file, line by line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_metrics_file_is_json_line_by_line_and_at_once(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text("of a run before")
    rows = ({**ROW, "step": 1}, {**ROW, "validation_loss": 1.5})
    with MetricsFile(path, LINES) as sink:
        sink.write([Message(Metrics(rows), 1.0), Message(Event("spike", "too high"), 1.0), Message(Finished(2), 1.0)])
        assert [(row["step"], row["loss"]) for row in rows_of(path)] == [(1, "nan"), (2, "nan")]
        file = sink._file
    assert file.closed
    assert capsys.readouterr().out.splitlines() == [
        "step 1/9 | loss nan | grad norm 0.500 | lr 3.0e-04 | 4,197 tok/s | MFU 31.2% | 286 MiB",
        "step 2/9 | loss nan | grad norm 0.500 | lr 3.0e-04 | 4,197 tok/s | MFU 31.2% | 286 MiB",
        "step 2 | validation loss 1.5000",
        "too high",
    ]


@pytest.mark.parametrize(("every", "lines_of"), [(0, []), (1, [*range(1, 9)]), (3, [1, 3, 6, 8])])
def test_log_has_lines_of_every_few_steps_of_the_first_and_of_the_last(every, lines_of):
    lines = LogLines(steps=8, every=every, generation=2)
    payloads = [Metrics(({**ROW, "step": step},)) for step in range(1, 9)]
    assert [int(line.split()[1].split("/")[0]) for each in payloads for line in lines.of(each)] == lines_of
    again = Metrics(({**ROW, "step": 3, "generation": 1, "validation_loss": 1.5},))
    assert lines.of(again) == [], "an earlier generation has logged it"


def test_log_says_why_a_generation_begins_and_why_its_ranks_stop():
    first, later = LogLines(8, 1, generation=1), LogLines(8, 1, generation=2, cause="rank 5 was killed")
    assert first.of(Started(7)) == ["generation 1: starts at step 1"]
    assert later.of(Started(7, step=3)) == ["generation 2: continues after step 3; rank 5 was killed"]
    assert LogLines(8, 1, rank=1, generation=2).of(Started(7, step=3)) == [], "one rank is enough"
    assert later.of(Resting(3, "lost rank 5")) == ["generation 2: rank 0 stopped after step 3: lost rank 5"]
    named = Metrics(({**ROW, "step": 2, "validation_loss_wiki_2": 1.5},))
    assert LogLines(8, 0, generation=2).of(named) == ["step 2 | validation loss wiki_2 1.5000"]


@pytest.mark.parametrize(("name", "why"), [("no/metrics.jsonl", "No such file or directory"), (".", "Is a directory")])
def test_unwritable_metrics_file_is_named(tmp_path, name, why):
    path = tmp_path / name
    with pytest.raises(MantaError) as caught, MetricsFile(path, LINES):
        pass
    assert str(caught.value) == f"--metrics: {path} cannot be written ({why})"


def test_full_disk_stops_metrics_but_neither_output_nor_training(capsys):
    sentence = "--metrics: /dev/full cannot be written (No space left on device)"
    with pytest.raises(MantaError, match=re.escape(sentence)), MetricsFile(Path("/dev/full"), LINES) as sink:
        sink.write([Message(Metrics((ROW,)), 1.0)])
        sink.write([Message(Metrics(({**ROW, "step": 3},)), 1.0)])
    said = capsys.readouterr()
    assert [line.split()[1] for line in said.out.splitlines()] == ["2/9", "3/9"]
    assert said.err == f"{sentence}; training goes on\n"


def test_metrics_are_written_even_if_nobody_reads_the_output(tmp_path, monkeypatch):
    reads, writes = os.pipe()
    os.close(reads)
    path = tmp_path / "metrics.jsonl"
    with os.fdopen(writes, "w") as pipe, MetricsFile(path, LINES) as sink:
        monkeypatch.setattr(sys, "stdout", pipe)
        sink.write([Message(Metrics((ROW,)), 1.0)])
        sink.write([Message(Event("spike", "too high"), 1.0), Message(Metrics(({**ROW, "step": 3},)), 1.0)])
        monkeypatch.undo()
    assert [row["step"] for row in rows_of(path)] == [2, 3]


def test_metrics_are_printed_without_a_metrics_file(capsys):
    with MetricsFile(None, LINES) as sink:
        sink.write([Message(Metrics((ROW,)), 1.0)])
    assert "step 2/9" in capsys.readouterr().out
