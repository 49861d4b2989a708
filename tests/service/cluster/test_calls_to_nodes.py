"""Calls to what is on a node end with the node, whatever Ray says."""

import asyncio
from types import SimpleNamespace

import pytest

from manta.service.cluster.agent_client import AgentLost, AgentTimeout, within
from manta.service.cluster.agents import CallsToNodes
from tests.service.support.virtual_time import in_virtual_time


@pytest.fixture
def nodes():
    return SimpleNamespace(lost=set())


async def never():
    await asyncio.Event().wait()


async def soon():
    await asyncio.sleep(1)
    return "answer"


def test_node_calls_in_progress_fail_when_their_node_is_lost(nodes, monkeypatch):
    async def body():
        calls, loop = CallsToNodes(nodes), asyncio.get_running_loop()
        gone = [asyncio.create_task(calls.answer("a", never)) for _ in range(3)]
        others = [asyncio.create_task(calls.answer(node, soon)) for node in ("b", None)]
        await asyncio.sleep(0.5)
        calls.fail("a")
        calls.fail("a")
        outcomes = await asyncio.gather(*gone, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [AgentLost] * 3 and loop.time() == 0.5
        assert (outcomes[0].kind, str(outcomes[0])) == ("NodeLost", "node a is lost")
        assert await asyncio.gather(*others) == ["answer"] * 2
        assert calls._waiting == {}

    in_virtual_time(monkeypatch, body)


def test_node_calls_fail_without_being_made_while_the_node_is_lost(nodes, monkeypatch):
    async def body():
        calls = CallsToNodes(nodes)
        nodes.lost = {"a"}
        with pytest.raises(AgentLost):
            await calls.answer("a", lambda: pytest.fail("it was called"))
        nodes.lost.clear()
        calls.fail("b")
        assert await calls.answer("a", soon) == "answer"

    in_virtual_time(monkeypatch, body)


@pytest.mark.parametrize("error", [TimeoutError, ValueError])
def test_node_calls_raise_the_error_of_the_call_itself(nodes, error):
    async def wrong():
        raise error

    with pytest.raises(error):
        asyncio.run(CallsToNodes(nodes).answer("a", wrong))


def test_node_calls_without_an_answer_in_time_raise_agent_timeout(nodes, monkeypatch):
    async def body():
        with pytest.raises(AgentTimeout):
            await within(10, CallsToNodes(nodes).answer("a", never))

    in_virtual_time(monkeypatch, body)
