"""Whole steps over process groups (gloo, as GPUs use NCCL) are those over the links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_specs import axes, document
from rank_processes import HOST, SECRET
from rank_programs import train_job

from workers.comm.comm import Comm
from workers.config import ParallelConfig
from workers.errors import PeerLost
from workers.protocol.messages import Resume
from workers.reporter import Reporter
from workers.spec.reading import parse_job_spec
from workers.trainer import Places, Trainer

STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "numbers.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
    return str(path)


def job(corpus: str, parallel: dict[str, Any], **train: Any) -> tuple[ParallelConfig, dict[str, Any]]:
    """A layout, and a job in it that measures the parts of every second step."""
    numbers = {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "time_parts_every": 2, **train}
    return ParallelConfig(**parallel), document(data={"paths": [corpus]}, train=numbers, parallel=parallel)


SAME_BITS = {
    "tensor": (axes((2, 1, 1)), {}),
    "1f1b": ({**axes((1, 2, 1)), "schedule": "1f1b"}, {}),
    "zb-h1": ({**axes((1, 2, 1)), "schedule": "zb-h1"}, {}),
    "zb-v": ({**axes((1, 2, 1)), "schedule": "zb-v", "virtual_stages": 2}, {}),
    "data": (axes((1, 1, 2)), {}),
    "data-elastic": (axes((1, 1, 2)), {"deterministic": "elastic"}),
}


@pytest.mark.parametrize("name", SAME_BITS)
def test_steps_of_two_ranks_have_the_same_bits(ranks, corpus, name):
    """A sum of two numbers has no order."""
    layout, spec = job(corpus, *SAME_BITS[name][:1], **SAME_BITS[name][1])
    links = ranks.run(layout, train_job, spec)
    groups = ranks.run(layout, train_job, spec, backend="process_groups")
    for trained, expected in zip(groups, links, strict=True):
        assert trained.statistics == expected.statistics
        assert torch.equal(trained.parameters, expected.parameters)
        for kind, part in expected.state.items():
            assert torch.equal(trained.state[kind], part), kind


def test_steps_of_four_ranks_differ_by_the_order_of_sums_at_most(ranks, corpus):
    layout, spec = job(corpus, axes((2, 1, 2)))
    links = ranks.run(layout, train_job, spec)
    groups = ranks.run(layout, train_job, spec, backend="process_groups")
    for trained, expected in zip(groups, links, strict=True):
        for numbers, others in zip(trained.statistics, expected.statistics, strict=True):
            assert numbers == pytest.approx(others, rel=1e-6)


def test_where_the_time_of_a_step_went_is_told_over_process_groups_too(ranks, corpus):
    layout, spec = job(corpus, axes((1, 2, 1)))
    rows = ranks.run(layout, train_job, spec, backend="process_groups")[0].rows
    measured = [row for row in rows if "bubble_seconds" in row]
    assert [row["step"] for row in measured] == [2, 4]
    assert all(row["bubble_seconds"] > 0 for row in measured)  # waits and transfers cannot be told apart


def train_in_two_generations(comm: Comm, document: dict[str, Any], folder: str, port: int, lost: bool) -> Any:
    """Two steps, then the same process in the next generation up to the end. With `lost` the last rank leaves in front
    of a step that the others have begun."""
    reporter = Reporter(lambda messages: None)
    trainer = Trainer(parse_job_spec(document), comm, reporter, 1e12, Places("test", snapshots=folder))
    trainer.restore(Resume())
    losses = [trainer.train_step().loss for _ in range(2)]
    comm.barrier()
    if lost and comm.rank < comm.size("world") - 1:
        with pytest.raises(PeerLost):
            trainer.train_step()
    comm.close()
    trainer.rest()
    assert trainer.settled_step == 2
    assert not dist.is_initialized()
    comm.connect(dist.TCPStore(HOST, port, is_master=False), comm.generation + 1_000_000, HOST, SECRET)
    trainer.restore(Resume("snapshot", 2))
    losses += [trainer.train_step().loss for _ in range(STEPS - 2)]
    comm.barrier()
    reporter.close()
    trainer.close()
    return losses


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        *(("tensor", False), ("1f1b", True), ("data", True)),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("tensor", True), ("1f1b", False), ("data", False))),
    ],
)
def test_ranks_meet_again_in_the_next_generation(ranks, corpus, tmp_path: Path, name, lost):
    layout, spec = job(corpus, SAME_BITS[name][0])
    clean = [loss for loss, _ in ranks.run(layout, train_job, spec)[0].statistics]
    again = (str(tmp_path), ranks.port, lost)
    for losses in ranks.run(layout, train_in_two_generations, spec, *again, backend="process_groups"):
        assert losses == clean
