"""Ranks that prepare data are seen to live, and train on the same tokens or not at all."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_specs import spec
from reported import events_of
from tokenizer_files import TEXT

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.data.prepare import Corpus
from manta.workers.errors import DataError
from manta.workers.liveness.hang_detection import hang_timeout
from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.protocol.messages import Resume
from manta.workers.trainer import StatePaths, Trainer, check_same_tokens
from manta.workers.training.reporter import DataWatch, Reporter


def test_rank_that_prepares_data_shows_progress_and_reports_events(tmp_path):
    progress = Progress.shared(tmp_path, 0)
    comm = Comm(RankGrid(spec().layout), 0, torch.device("cpu"), progress=progress)
    messages = []
    reporter = Reporter(messages.extend)
    watch, reader = DataWatch(comm, reporter), ProgressReader(progress_path(tmp_path, 0))
    before = reader.read()
    watch.alive()
    after = reader.read()
    assert (before.phase, after.phase) == ("starting", "preparing")
    assert after.heartbeat > before.heartbeat
    watch.report("data_prepared", "has 7 tokens", {"tokens": 7})
    reporter.close()
    (message,) = messages
    assert (message.payload.type, message.payload.message) == ("data_prepared", "has 7 tokens")
    assert reader.read().heartbeat > after.heartbeat
    assert hang_timeout("preparing", (), False, False, False) == 300.0


def test_trainer_trains_its_tokenizer_and_prepares_data_with_an_event_for_each_stage(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(TEXT))
    data = {"paths": [str(path)], "tokenizer": "bpe", "tokenizer_vocabulary": 300}
    job = spec(data=data, train={"steps": 2})
    messages = []
    reporter = Reporter(messages.extend)
    comm = Comm(RankGrid(job.layout), 0, torch.device("cpu"))
    trainer = Trainer(job, comm, reporter, 1e9, StatePaths(token_cache=tmp_path / "cache"))
    trainer.restore(Resume())
    trainer.train()
    trainer.close()
    reporter.close()
    kinds = [event["type"] for event in events_of(messages)]
    wanted = ["tokenizer_training", "tokenizer_trained", "data_preparing", "data_prepared"]
    assert [kind for kind in kinds if kind in wanted] == wanted
    assert trainer.batches.corpus.read(0, 50).max() < 300


class SaidTogether:
    """Stands in for the communication of ranks that are threads."""

    device = torch.device("cpu")

    def __init__(self, count):
        self._barrier, self._lock, self._sum, self._count = threading.Barrier(count), threading.Lock(), None, count

    def size(self, axis):
        return self._count

    def confirm(self):
        """Nothing is broken off."""

    def all_reduce(self, axis, tensor, largest):
        assert largest
        with self._lock:
            self._sum = tensor.clone() if self._sum is None else torch.maximum(self._sum, tensor)
        self._barrier.wait(10)
        tensor.copy_(self._sum)


@pytest.mark.parametrize(("last", "same"), [("a1", True), ("a2", False)])
def test_all_ranks_report_an_error_if_one_has_different_tokens(last, same):
    comm, errors = SaidTogether(3), []
    digests = ["a1" * 32, "a1" * 32, "a1" * 31 + last]

    def rank(digest):
        try:
            check_same_tokens(Corpus([b""], digest), comm)
        except DataError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank, args=(digest,)) for digest in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(errors) == (0 if same else 3), "all ranks know"
    assert all("have different tokens" in error for error in errors)


def test_single_rank_accepts_its_tokens_without_comparing_them():
    check_same_tokens(Corpus([b""], "a1" * 32), SaidTogether(1))
