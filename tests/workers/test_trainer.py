"""What a trainer owes a job beyond its steps."""

import shutil

import torch
from engine_specs import spec

from workers.checkpoint.catalog import whole_checkpoints
from workers.comm import Comm
from workers.messages import Resume
from workers.parallel.grid import RankGrid
from workers.reporter import Reporter
from workers.trainer import Places, Trainer


def _trainer(job, places):
    comm = Comm(RankGrid(job.layout), 0, torch.device("cpu"))
    comm.generation = 1
    return Trainer(job, comm, Reporter(lambda messages: None), 1e9, places)


def test_last_step_is_saved_though_a_rank_died_while_it_was_being_saved(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be or not to be, that is the question. " * 20, encoding="utf-8")
    job = spec(data={"paths": [str(corpus)]}, train={"steps": 2})
    places = Places(snapshots=str(tmp_path / "shared"), checkpoints=str(tmp_path / "durable"))
    first = _trainer(job, places)
    first.restore(Resume())
    first.train()
    assert [manifest.step for _, manifest in whole_checkpoints(places.checkpoints)] == [2]
    shutil.rmtree(places.checkpoints)  # as if the process had died before the manifest

    second = _trainer(job, places)
    second.restore(Resume("snapshot", 2))
    second.train()
    assert [manifest.step for _, manifest in whole_checkpoints(places.checkpoints)] == [2]
