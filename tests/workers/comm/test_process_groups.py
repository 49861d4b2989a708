"""Whole steps over process groups (gloo, as GPUs use NCCL) are those over the links."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_specs import axes, document
from rank_processes import HOST, SECRET
from rank_programs import train_job

from manta.workers.comm.comm import Comm
from manta.workers.comm.process_groups import ProcessGroups
from manta.workers.config import ParallelConfig
from manta.workers.errors import PeerLost
from manta.workers.protocol.messages import Resume
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

STEPS = 4


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
def test_process_groups_and_links_give_two_ranks_the_same_bits(ranks, corpus, name):
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


def test_step_over_process_groups_reports_its_bubble(ranks, corpus):
    layout, spec = job(corpus, axes((1, 2, 1)))
    rows = ranks.run(layout, train_job, spec, backend="process_groups")[0].rows
    measured = [row for row in rows if "bubble_seconds" in row]
    assert [row["step"] for row in measured] == [2, 4]
    assert all(row["bubble_seconds"] > 0 for row in measured)  # waits and transfers cannot be told apart


def train_in_two_generations(comm: Comm, document: dict[str, Any], folder: str, port: int, lost: bool) -> Any:
    """Two steps, then the same process in the next generation up to the end. With `lost` the last rank leaves in front
    of a step that the others have begun."""
    reporter = Reporter(lambda messages: None)
    trainer = Trainer(parse_job_spec(document), comm, reporter, 1e12, StatePaths("test", snapshots=folder))
    trainer.restore(Resume())
    losses = [trainer.train_step().loss for _ in range(2)]
    comm.barrier()
    if lost and comm.rank < comm.size("world") - 1:
        with pytest.raises(PeerLost):
            trainer.train_step()
    comm.close()
    trainer.rest()
    assert trainer.settled_step == 2
    assert dist.is_initialized() == (comm._regroup.way == "reconfigure")
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


def interrupted_wait(comm: Comm, where: str, port: int) -> tuple[str, float]:
    """Waits for the last rank, which takes no part, until another thread ends the generation; then the same process
    adds up ones in the next one. Returns what the wait said, and the sum."""
    tensor, generation, why = torch.zeros(4), comm.generation, ""
    store = dist.PrefixStore(f"interrupted-{generation}", dist.TCPStore(HOST, port, is_master=False))
    last = comm.size("world") - 1
    if comm.rank == last:  # it lives, and says nothing
        store.wait([str(rank) for rank in range(last)])
    else:
        threading.Timer(0.3, comm.end, [generation]).start()
        with pytest.raises(PeerLost) as caught:
            comm.receive(1, tensor).wait() if where == "message" else comm.all_reduce("world", tensor)
        why = str(caught.value)
        store.set(str(comm.rank), "is freed")
    comm.close()
    assert dist.is_initialized() == (comm._regroup.way == "reconfigure")
    comm.connect(dist.TCPStore(HOST, port, is_master=False), generation + 1_000_000, HOST, SECRET)
    tensor.fill_(1.0)
    comm.all_reduce("world", tensor)
    comm.barrier()
    return why, tensor[0].item()


@pytest.mark.parametrize(("where", "layout"), [("message", (1, 2, 1)), ("sum", (2, 1, 2))])
def test_process_group_wait_is_ended_by_another_thread_and_the_process_goes_on(ranks, where, layout):
    program = (interrupted_wait, where, ranks.port)
    results = ranks.run(ParallelConfig(**axes(layout)), *program, backend="process_groups", seconds=60)
    for rank, (why, total) in enumerate(results):
        assert total == len(results)
        if rank < len(results) - 1:
            assert why.startswith(("communication failed: ", "communication was interrupted"))


def waits_for_nobody(comm: Comm, at: str, port: int) -> str:
    """In the next generation rank 1 does not come, or stops after it has come, until rank 0 is freed."""
    generation = comm.generation + 1_000_000
    comm.close()
    store = dist.TCPStore(HOST, port, is_master=False)
    freed = f"freed-{generation}"
    if comm.rank == 1:
        if at == "groups":
            absent = ProcessGroups(comm.grid, 1, comm.device, comm._regroup)
            absent._wait_for_all(dist.PrefixStore(f"generation-{generation}", store))
        store.wait([freed])
        return ""

    def end() -> None:
        """While this rank waits, at the groups after both have come."""
        if at == "groups":
            dist.PrefixStore(f"generation-{generation}", dist.TCPStore(HOST, port, is_master=False)).wait(["all-here"])
        time.sleep(0.5)
        comm.end(generation)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(PeerLost) as caught:
        comm.connect(store, generation, HOST, SECRET)
    comm.close()
    dist.TCPStore(HOST, port, is_master=False).set(freed, "")  # the other connection to it was broken off, too
    return str(caught.value)


@pytest.mark.parametrize("at", ["the meeting", "groups"])
def test_process_group_rank_waiting_for_a_peer_to_join_is_freed(ranks, at):
    layout = ParallelConfig(**axes((1, 2, 1)))
    why, _ = ranks.run(layout, waits_for_nobody, at, ranks.port, backend="process_groups", seconds=60)
    assert why


def cut_in_the_middle(comm: Comm, kind: str, port: int) -> None:
    """The last rank goes away in the middle of one of many large exchanges; the others are told later."""
    generation, large = comm.generation, torch.ones(20_000_000)
    comm.barrier()
    threading.Timer(0.02 if comm.rank == 1 else 0.8, comm.end, [generation]).start()
    with pytest.raises(PeerLost):
        while True:  # a fast machine is done with one before anybody goes
            if kind == "sum":
                comm.all_reduce("tensor", large)
            elif kind == "parts of a sum":
                comm.reduce_scatter("tensor", large)
            elif comm.rank == 1:
                comm.send(0, large).wait()
            else:
                comm.receive(1, large).wait()
    comm.close()
    comm.connect(dist.TCPStore(HOST, port, is_master=False), generation + 1_000_000, HOST, SECRET)
    comm.barrier()


@pytest.mark.parametrize(
    ("kind", "layout"), [("message", (1, 2, 1)), ("sum", (2, 1, 1)), ("parts of a sum", (2, 1, 1))]
)
def test_half_received_message_does_not_block_the_next_generation(ranks, kind, layout):
    """Nor the next generation: all meet again."""
    program = (cut_in_the_middle, kind, ranks.port)
    ranks.run(ParallelConfig(**axes(layout)), *program, backend="process_groups", seconds=60)


def gathers_into_too_little(comm: Comm) -> str:
    """What torch says to a result that does not fit; the ranks still have each other after that."""
    with pytest.raises(RuntimeError) as caught:
        comm.all_gather("tensor", torch.ones(2), torch.ones(3))
    comm.barrier()
    return str(caught.value)


def test_wrongly_sized_result_is_not_a_lost_peer(ranks):
    for said in ranks.run(ParallelConfig(**axes((2, 1, 1))), gathers_into_too_little, backend="process_groups"):
        assert "size" in said
