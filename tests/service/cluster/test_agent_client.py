"""Agents and daemons over an actor that speaks Ray's language: JSON crosses, Ray's errors do not."""

import asyncio
import inspect
import itertools
import json
import typing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from manta.service.cluster.agent_client import (
    AgentClient,
    AgentFailed,
    AgentLost,
    AgentTimeout,
    NodeClient,
    within,
)
from manta.service.leases.decisions import LeaseLost, LeaseUncertain
from manta.workers.node.daemon import NodeDaemon
from manta.workers.protocol import messages
from manta.workers.protocol.json_codec import JsonObject
from manta.workers.protocol.messages import (
    AgentDescription,
    Endpoint,
    Fault,
    Launched,
    LaunchOrder,
    NodeDescription,
    ProtocolMismatch,
    TraceOrder,
)
from manta.workers.protocol.remote_call import EPOCH, StaleOwner, serve
from manta.workers.protocol.requests import RankRequest, RecordSteps, SaveAndEnd
from manta.workers.rank.agent import Agent
from tests.service.support.fake_agents import FakeAgent


class RayError(Exception):
    """As all errors of Ray."""


class RayTaskError(RayError):
    """An error of the method itself."""


class ActorDiedError(RayError):
    """The actor is dead."""


RAY = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError))


def over_ray(target, client=AgentClient):
    """A client of `target` as if that were an actor."""

    async def carry(method, arguments):
        answer = await serve(target, method, json.loads(json.dumps(arguments)))
        return json.loads(json.dumps(answer))

    return client(RAY, SimpleNamespace(call=SimpleNamespace(remote=carry)))


def raising(error):
    async def carry(method, arguments):
        raise error

    return AgentClient(RAY, SimpleNamespace(call=SimpleNamespace(remote=carry)))


async def test_calls_go_to_the_node_that_the_agent_has_described():
    """A rank that is placed again has another agent, so an agent stays where it is."""
    asked = []

    class Calls:
        async def answer(self, node, call):
            asked.append(node)
            return await call()

    agent = over_ray(FakeAgent(node="n1"))
    agent._calls = Calls()
    await agent.snapshot_steps()
    await agent.describe()
    await agent.snapshot_steps()
    assert asked == [None, None, "n1"]


async def test_orders_reports_and_answers_cross_with_their_types():
    there = FakeAgent()
    agent = over_ray(there)
    order = LaunchOrder("job-1", 2, 0, {"any": 1}, faults=(Fault("f", "kill", 0),))
    assert await agent.launch(order) == Launched(there._pid)
    assert there.orders == [order]
    (report,) = await agent.reports(0, 1.0)
    assert report == there._reports[0]
    assert await agent.describe() == await there.describe()
    assert await agent.progress() is None


def calls_of(cls):
    """Names of what other processes may call, except for the way there."""
    return {
        name
        for name, method in inspect.getmembers(cls, inspect.iscoroutinefunction)
        if not name.startswith("_") and name != "call"
    }


def test_fake_agent_has_the_calls_of_agents():
    for name in calls_of(Agent):
        assert getattr(FakeAgent, name).__annotations__ == getattr(Agent, name).__annotations__, name


class Heard(Exception):
    """A call has arrived."""


METHODS = [
    (target, client, name)
    for target, client in ((Agent, AgentClient), (NodeDaemon, NodeClient))
    for name in sorted(calls_of(target))
]


@pytest.mark.parametrize(("target", "client", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_client_passes_every_argument_to_the_agent_or_daemon(target, client, name):
    hints, heard, numbers = typing.get_type_hints(getattr(target, name)), [], itertools.count(1)
    made = {
        int: lambda: next(numbers), float: lambda: next(numbers) / 2, str: lambda: f"text {next(numbers)}",
        bool: lambda: True, int | None: lambda: next(numbers), str | None: lambda: f"text {next(numbers)}",
        RankRequest: lambda: RecordSteps(TraceOrder(1, 2, 3, 4, (0, 2))), Endpoint: lambda: Endpoint("there", 7000),
        LaunchOrder: lambda: LaunchOrder("job-1", 2, 3, {"any": 1}),
        tuple[int, ...] | None: lambda: (next(numbers), next(numbers)),
        list[Endpoint]: lambda: [Endpoint("there", next(numbers))],
        JsonObject: lambda: {"any": next(numbers)}, list[str] | None: lambda: [f"text {next(numbers)}"],
    }  # fmt: skip

    async def note(self, **given):
        heard.append(given)
        raise Heard

    note.__annotations__ = dict(hints)
    given = {parameter: made[kind]() for parameter, kind in hints.items() if parameter != "return"}
    there = over_ray(type("There", (), {name: note})(), client)
    for call in (getattr(there, name)(*given.values()), getattr(there, name)(**given)):
        with pytest.raises(Heard):
            asyncio.run(call)
    assert heard == [given, given]


def test_errors_of_ray_are_translated_with_their_last_line():
    for error, kind in ((ActorDiedError("long\nstory\nits end"), AgentLost), (RayTaskError("its end"), AgentFailed)):
        with pytest.raises(kind, match=r"^its end$") as caught:
            asyncio.run(raising(error).snapshot_files())
        assert caught.value.kind == type(error).__name__


async def test_agent_answer_that_is_late_raises_agent_timeout():
    silent = FakeAgent()
    silent.silence()
    with pytest.raises(AgentTimeout, match=r"no answer in 0.01 s"):
        await within(0.01, silent.describe())


def test_client_refuses_an_agent_or_daemon_of_another_protocol():
    class Newer:
        async def describe(self) -> AgentDescription:
            return AgentDescription("h", "a", 1, protocol=99)

        async def start(self) -> NodeDescription:
            return NodeDescription("n", "h", "a", 1, 2, protocol=99)

    with pytest.raises(ProtocolMismatch, match=r"protocol 99 and this process .* or cancel the job"):
        asyncio.run(over_ray(Newer()).describe())
    with pytest.raises(ProtocolMismatch, match=r"daemon of node n speaks protocol 99 .* once no job runs on its node"):
        asyncio.run(over_ray(Newer(), NodeClient).start())


async def test_orders_use_the_protocol_of_the_receiving_agent(monkeypatch):
    monkeypatch.setattr(messages, "SPOKEN", (1, messages.PROTOCOL))
    there = FakeAgent()
    there.description = replace(there.description, protocol=1)
    agent = over_ray(there)
    await agent.describe()
    await agent.launch(LaunchOrder("job", 1, 0, {}))
    await agent.prepare(LaunchOrder("job", 2, 0, {}))
    assert [order.protocol for order in (*there.orders, *there.prepared)] == [1, 1]
    await over_ray(there).launch(LaunchOrder("job", 3, 0, {}))
    assert there.orders[-1].protocol == messages.PROTOCOL


class _RaysStaleOwner(RayTaskError, StaleOwner):
    """As Ray makes an error that the actor raised: one of both kinds."""

    def __init__(self):
        Exception.__init__(self, "an owner of a later epoch gives orders")


def owned_agent(epoch, error=None):
    """A client of an agent of job_1 that is owned with `epoch`, and the calls that arrive there."""
    calls, asked = [], []

    async def carry(method, arguments):
        calls.append((method, arguments))
        if error is not None:
            raise error

    def of(job, method):
        asked.append((job, method))
        if isinstance(epoch, Exception):
            raise epoch
        return epoch

    return AgentClient(RAY, SimpleNamespace(call=SimpleNamespace(remote=carry)), "job_1", of), calls, asked


def test_agent_calls_carry_the_epoch_of_the_owner_if_there_is_one():
    for epoch, carried in ((7, {EPOCH: 7}), (None, {})):
        agent, calls, asked = owned_agent(epoch)
        asyncio.run(agent.stop_backups())
        assert (calls, asked) == ([("stop_backups", carried)], [("job_1", "stop_backups")])


def test_lease_is_asked_about_the_request_that_an_agent_is_told():
    agent, _, asked = owned_agent(7, StaleOwner("refused"))
    with pytest.raises(LeaseLost):
        asyncio.run(agent.tell(SaveAndEnd(2)))
    assert asked == [("job_1", "tell save_and_end")]


def test_agent_order_is_not_sent_while_the_lease_is_uncertain():
    agent, calls, asked = owned_agent(LeaseUncertain("job_1"))
    with pytest.raises(LeaseUncertain):
        asyncio.run(agent.stop_backups())
    with pytest.raises(LeaseUncertain):
        agent.check_order()
    assert (calls, asked[-1]) == ([], ("job_1", None)), "which ends what a job has by other ways"


@pytest.mark.parametrize("error", [StaleOwner("refused"), _RaysStaleOwner()])
def test_agent_with_a_later_owner_makes_the_client_raise_lease_lost(error):
    agent, _, _ = owned_agent(7, error)
    with pytest.raises(LeaseLost, match="job_1"):
        asyncio.run(agent.stop_backups())
