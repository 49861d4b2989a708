"""Whether repair in place works is tried by a job's first ranks, and what follows from that."""

from dataclasses import replace

from trainer_rig import finish, lose_peer, order

from manta.workers.protocol.reports import Finished, Resting, Started
from manta.workers.rank import trainer_process
from manta.workers.rank.control_socket import Go
from manta.workers.rank.trainer_process import EXIT_PEER_LOST

REPAIR = {"seconds": 0.5, "way": "by hand", "torch_version": "2.13.0", "nccl_version": None}


WORKS = {**REPAIR, "passed": True, "problem": ""}


FAILS = {**REPAIR, "passed": False, "problem": "rank 2: no"}


def tries_repair(monkeypatch, self_test, rank=0):
    """An order to try repair in place, with what its ranks find out."""
    monkeypatch.setattr(trainer_process.dist, "TCPStore", lambda host, port, is_master, timeout: (host, port))
    meeting = {"store_host": "h", "store_port": 7, "secret": "s"}
    return order(1, rank, spec={"world": 4, "repair": self_test}, tries_repair=True, **meeting)


def test_trainer_with_a_passed_repair_self_test_rests_after_a_lost_peer(rig, monkeypatch):
    run = rig(lose_peer, finish)
    run.start(tries_repair(monkeypatch, WORKS))
    event, started, resting = (run.hear().payload for _ in range(3))
    assert (event.type, event.data, event.step) == ("repair_self_test", WORKS, 0)
    assert event.message == "repair in place works here (by hand, tested in 0.5 s)"
    assert isinstance(started, Started) and resting == Resting(4, "rank 1 is gone")
    (trainer,) = run.built
    assert trainer.comm.connected == [("tries repair", ("h", 7), 1), (("h", 7), 1, "h", "s")], "in that order"
    run.say(Go(replace(run.process.order, generation=2, in_place=True, tries_repair=False)))
    assert [type(run.hear().payload) for _ in range(2)] == [Started, Finished]
    assert run.built == [trainer] and len(trainer.comm.connected) == 3, "and is not tried again"


def test_trainer_with_a_failed_repair_self_test_ends_after_a_lost_peer(rig, monkeypatch):
    run = rig(lose_peer)
    run.start(tries_repair(monkeypatch, FAILS))
    event, started, failure = (run.hear().payload for _ in range(3))
    assert event.data == FAILS
    assert event.message == "no repair in place: rank 2: no; after a failure all ranks are restarted"
    assert isinstance(started, Started) and failure.kind == "peer_lost"
    assert run.ended() == EXIT_PEER_LOST


def test_trainer_ends_before_training_if_the_repair_self_test_leaves_it_unusable(rig, monkeypatch):
    run = rig(finish)
    run.start(tries_repair(monkeypatch, {**FAILS, "usable": False}))
    assert run.hear().payload.type == "repair_self_test"
    failure = run.hear().payload
    assert (failure.kind, failure.message) == ("peer_lost", "the self-test of repair in place went wrong: rank 2: no")
    assert run.ended() == EXIT_PEER_LOST


def test_repair_self_test_is_reported_by_one_rank_only(rig, monkeypatch):
    run = rig(finish)
    run.start(tries_repair(monkeypatch, WORKS, rank=3))
    assert isinstance(run.hear().payload, Started)
