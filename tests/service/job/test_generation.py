"""A running generation as its supervisor sees it, over agents that only say what a test lets them say."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from manta.service.job import generation
from manta.service.job.generation import RunningGeneration
from manta.service.job.inbox import Cancel, Inbox, Pause
from manta.workers.protocol.reports import Exited, Finished, KillReason, Metrics, Resting
from tests.service.support.generations import agent_of, failed, stalled
from tests.service.support.waiting import reached


async def test_generation_ends_when_all_ranks_finished(running, agents, handled):
    for agent in agents:
        agent.say(Finished(9))
        agent.say(Exited(code=0))
    await running.wait(Inbox())
    assert running.all_ended
    assert running.finished == {0, 1}
    assert running.deaths == []
    assert sorted(handled) == [(0, "exit"), (0, "finished"), (1, "exit"), (1, "finished")]


@pytest.mark.parametrize(
    ("said", "finished", "dead"),
    [
        ([Exited(code=0)], {0, 1}, []),
        ([Finished(9), Exited(signal=9)], {0, 1}, []),  # all that it was to do is done and saved by then
        ([Finished(9), failed("not_saved")], {1}, [(0, "not_saved")]),
    ],
)
async def test_rank_has_finished_with_a_report_or_code_0_but_not_with_a_failure(running, agents, said, finished, dead):
    for payload in said:
        agents[0].say(payload)
    agents[1].finish(9)
    await reached(lambda: running.all_ended)
    assert (running.finished, [(death.rank, death.kind) for death in running.deaths]) == (finished, dead)


@pytest.mark.parametrize("agents", [3], indirect=True)
async def test_lost_peer_report_waits_for_the_death_that_caused_it(running, agents, monkeypatch):
    monkeypatch.setattr(generation, "CULPRIT_SECONDS", 1e6)
    agents[0].say(failed("peer_lost"))
    await running.wait(Inbox())
    assert [death.kind for death in running.deaths] == ["peer_lost"]
    waiting = asyncio.create_task(running.wait_for_culprit())
    agents[1].say(Exited(signal=9))
    await waiting
    assert [(death.rank, death.kind) for death in running.deaths] == [(0, "peer_lost"), (1, "killed")]


@pytest.mark.parametrize("agents", [3], indirect=True)
async def test_death_time_of_a_rank_is_when_its_agent_saw_it(running, agents):
    agents[0].say(Exited(signal=9), at=40.0)
    agents[1].say(failed("exception", at=41.0), at=43.0)
    agents[2].say(stalled(True, 2.0), at=30.0)
    agents[2].say(stalled(False, 0.0), at=31.0)
    agents[2].say(stalled(True, 3.0), at=38.0)
    agents[2].say(Exited(signal=9, killed_for=KillReason("hung", "hung")), at=45.0)
    await reached(lambda: running.all_ended)
    assert {death.rank: (death.kind, death.at) for death in running.deaths} == {
        0: ("killed", 40.0), 1: ("exception", 41.0), 2: ("hung", 35.0)
    }  # fmt: skip


async def test_rank_that_resumed_after_a_stall_counts_as_alive_until_its_death(running, agents):
    agents[0].say(stalled(True, 2.0), at=30.0)
    agents[0].say(stalled(False, 0.0), at=31.0)
    agents[0].say(Exited(signal=9, killed_for=KillReason("straggler", "held up the others")), at=45.0)
    await running.wait(Inbox())
    assert [(death.kind, death.at) for death in running.deaths] == [("straggler", 45.0)]
    assert running.deaths[0].sentence == "rank 0 held up the others"


STOPPED = KillReason("stopped", "did not come to rest")


@pytest.mark.parametrize(
    ("exited", "kind", "said"),
    [
        (Exited(signal=9, memory_kills=0), "killed", "rank 1 was killed (SIGKILL; not the OOM killer)"),
        (Exited(7, None), "killed", "rank 1 exited with code 7"),
        (Exited(signal=9, killed_for=STOPPED), "peer_lost", "rank 0 stopped: a peer is gone"),
    ],
)
async def test_killed_rank_is_blamed_unless_its_own_agent_killed_it(running, agents, exited, kind, said):
    """Its peers may say sooner that they have lost it than its agent says how it ended."""
    agents[0].rest_by_itself(3)
    await running.wait(Inbox())
    agents[1]._exit(exited)
    await running.rest(0.01)
    assert [death.rank for death in running.deaths] == [1]
    assert (running.culprit.kind, running.culprit.sentence) == (kind, said)


async def test_lost_peer_without_a_culprit_is_not_waited_on_forever(running, agents):
    agents[0].say(failed("peer_lost"))
    await running.wait(Inbox())
    await running.wait_for_culprit()
    assert len(running.deaths) == 1


async def test_dead_rank_is_counted_once_if_its_node_is_lost_later(running, agents):
    """Who were counted twice would stand for one that still runs."""
    agents[0].die()
    await running.wait(Inbox())
    running.lose(0, "was on a node that is lost")
    assert [(death.rank, death.kind) for death in running.deaths] == [(0, "killed")]
    assert not running.all_ended


async def test_stop_of_a_generation_kills_every_rank_and_hears_its_last_report(running, agents, handled):
    agents[1].say(failed("exception"))
    await running.wait(Inbox())
    agents[0].say(Metrics(()))
    await running.stop()
    assert running.all_ended
    assert [(death.rank, death.kind) for death in running.deaths] == [(1, "exception"), (0, "stopped")]
    assert (0, "metrics") in handled
    assert [agent.stops for agent in agents] == [1, 1]
    assert running.deaths[0].sentence == "rank 1 failed with E: m at step 3"
    assert running.deaths[0].traceback == "t"


async def test_cancel_ends_the_wait_of_a_generation_and_leaves_its_ranks_alone(running, agents):
    inbox = Inbox()
    waiting = asyncio.create_task(running.wait(inbox, Cancel, Pause))
    inbox.put(Cancel())
    await waiting
    assert not running.all_ended
    assert [agent.stops for agent in agents] == [0, 0]


async def test_report_is_acknowledged_after_it_was_handled():
    agent, release, seen = agent_of(0), asyncio.Event(), asyncio.Event()

    async def handle(report):
        seen.set()
        await release.wait()

    running = RunningGeneration([agent], 1, {}, handle)
    agent.say(Metrics(()))
    await seen.wait()
    assert agent.acknowledged == [0]
    release.set()
    await reached(lambda: len(agent.acknowledged) >= 2)
    assert agent.acknowledged == [0, 1]
    await running.close()


async def test_reports_of_another_generation_change_nothing(running, agents, handled):
    for agent in agents:
        agent.say(Exited(code=1), generation=7)
        agent.say(Exited(code=0))
    await running.wait(Inbox())
    assert running.deaths == []
    assert handled == [(0, "exit"), (1, "exit")] or handled == [(1, "exit"), (0, "exit")]


async def test_report_handler_error_is_raised_by_wait():
    agent = agent_of(0)
    running = RunningGeneration([agent], 1, {}, AsyncMock(side_effect=RuntimeError("the database is full")))
    agent.say(Metrics(()))
    try:
        await running.wait(Inbox())
    except RuntimeError as error:
        assert "full" in str(error)
    else:
        raise AssertionError("wait said nothing")
    await running.close()


async def test_generation_with_a_resting_rank_counts_as_broken_without_a_death(running, agents):
    agents[1].say(Resting(7, "rank 0 hung up"))
    await running.wait(Inbox())
    assert running.broken and running.deaths == [] and running.resting == {1: 7}
    assert (running.culprit.rank, running.culprit.kind) == (1, "peer_lost")


@pytest.mark.parametrize("agents", [3], indirect=True)
async def test_generation_with_a_known_culprit_waits_for_no_other(running, agents, monkeypatch):
    monkeypatch.setattr(generation, "CULPRIT_SECONDS", 1e6)
    agents[1].say(Exited(signal=9))
    await running.wait(Inbox())
    await running.wait_for_culprit()
    assert (running.culprit.rank, running.culprit.kind) == (1, "killed")


async def test_generation_without_running_ranks_does_not_wait_for_a_culprit(running, agents, monkeypatch):
    monkeypatch.setattr(generation, "CULPRIT_SECONDS", 1e6)
    for agent in agents:
        agent.say(failed("peer_lost"))
    await reached(lambda: running.all_ended)
    await running.wait_for_culprit()
    assert [death.kind for death in running.deaths] == ["peer_lost", "peer_lost"]


async def test_ranks_that_saved_and_ended_do_not_count_as_dead(running, agents):
    agents[0].save_and_exit()
    agents[1].finish(9)
    await reached(lambda: running.all_ended)
    assert (running.saved, running.finished, running.deaths, running.broken) == ({0}, {1}, [], False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exception", "failed with E: m"),
        ("corrupt", "failed with E: m"),
        ("no_shared_memory", "m"),
        ("bad_data", "m"),
        ("unreadable_data", "m"),
        ("bad_checkpoint", "m"),
        ("unreadable_checkpoint", "m"),
        ("not_saved", "m"),
        ("not_finite", "m"),
        ("spike", "m"),
        ("device_lost", "m"),
        ("node_exhausted", "m"),
    ],
)
async def test_failure_message_of_self_explanatory_kinds_omits_the_exception_type(running, agents, kind, message):
    agents[0].say(failed(kind))
    await running.wait(Inbox())
    (death,) = running.deaths
    assert (death.kind, death.step, death.exception, death.message) == (kind, 3, "E", message)


async def test_last_output_of_a_process_that_died_silently_is_kept(running, agents):
    agents[0].say(Exited(code=3, last_output=("Fatal Python error", "  in product")))
    await running.wait(Inbox())
    (death,) = running.deaths
    assert (death.kind, death.message) == ("killed", "exited with code 3")
    assert death.traceback == "Fatal Python error\n  in product"


async def test_rest_is_asked_of_running_ranks_only_with_its_time_limits(running, agents):
    asked = []

    def noted(rank, rest):
        async def note(*arguments):
            asked.append((rank, *arguments))
            return await rest(*arguments)

        return note

    for agent in agents:
        agent.steps, agent.rest = [4], noted(agent.rank, agent.rest)
    agents[0].die()
    await running.wait(Inbox())
    await running.rest(5.0, 20.0)
    assert asked == [(1, 1, 5.0, 20.0)]
    assert running.resting == {1: 4}


async def test_generation_handles_reports_after_the_last_handled_one():
    agent, after, handled = agent_of(0), {0: 2}, []

    async def handle(report):
        handled.append(report.sequence)

    for _ in range(4):
        agent.say(Metrics(()))
    running = RunningGeneration([agent], 1, after, handle)
    await reached(lambda: agent.acknowledged == [2, 4])
    assert (handled, after) == ([3, 4], {0: 4})
    await running.close()


async def test_background_work_of_a_generation_ends_before_its_ranks_are_stopped(running, agents):
    ended = []

    async def short():
        ended.append("short")

    async def long():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("long")

    running.run_alongside(short())
    running.run_alongside(long())
    waiting = asyncio.create_task(running.wait(Inbox()))
    await reached(lambda: ended == ["short"])
    assert not waiting.done()
    agents[0].die()
    await waiting
    assert ended == ["short"]
    agents[1].stop = AsyncMock(side_effect=lambda: ended.append("ranks"))
    agents[1].lose()
    await running.stop()
    assert ended == ["short", "long", "ranks"], "it could take a rank that is ended for one that hangs"


async def test_background_task_error_is_raised_by_wait(running):
    """Or nobody would look for hangs any more, and nobody would know."""

    async def fail():
        raise RuntimeError("nobody looks any more")

    running.run_alongside(fail())
    with pytest.raises(RuntimeError, match="nobody looks any more"):
        await running.wait(Inbox())


@pytest.mark.parametrize("end", ["rest", "stop"])
async def test_report_handler_error_is_raised_by_rest_and_stop(end):
    async def handle(report):
        raise RuntimeError("somebody else has the lease")

    running = RunningGeneration([agent_of(0)], 1, {}, handle)
    with pytest.raises(RuntimeError, match="somebody else has the lease"):
        await (running.rest(5.0) if end == "rest" else running.stop())
    await running.close()


async def test_rank_that_came_to_rest_says_why_and_when(running, agents, monkeypatch):
    monkeypatch.setattr(generation, "CULPRIT_SECONDS", 1e6)
    agents[1].say(Resting(7, "rank 0 hung up"), at=40.0)
    await running.wait(Inbox())
    assert (running.culprit.message, running.culprit.at) == ("stopped: rank 0 hung up", 40.0)
    agents[0].say(Exited(signal=9))
    await running.wait_for_culprit()
    assert (running.culprit.rank, running.culprit.kind) == (0, "killed")
