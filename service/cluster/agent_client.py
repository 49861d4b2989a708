"""Agents and node daemons, as the control plane calls them over Ray.

What can be asked of them is defined by `Agent` and `NodeDaemon` themselves. Where a call goes, and what Ray raises on
the way, is known only here. Calls are sent as JSON (`workers/protocol/remote_call.py`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from manta.service.leases.decisions import LeaseLost
from manta.workers.errors import MantaError
from manta.workers.node.daemon import NodeDaemon
from manta.workers.protocol.json_codec import JsonObject
from manta.workers.protocol.messages import (
    PROTOCOL,
    AgentDescription,
    Launched,
    LaunchOrder,
    NodeDescription,
    check_protocol,
)
from manta.workers.protocol.remote_call import EPOCH, StaleOwner, call, call_name
from manta.workers.rank.agent import Agent

T = TypeVar("T")
A = TypeVar("A", bound="RayActor")
_OTHER_AGENT = "continue the job with a release that supports that protocol, or cancel the job"
_OTHER_DAEMON = "it is replaced once no job runs on its node"


class AgentError(MantaError):
    """An agent or a node's daemon did not do what it was asked; the message is one line."""

    def __init__(self, message: str, kind: str = ""):
        """`kind`: class of the original exception, for messages; by default this class."""
        super().__init__(message)
        self.kind = kind or type(self).__name__


class AgentLost(AgentError):
    """The actor, its node or the connection to it is gone."""


class AgentTimeout(AgentError):
    """The actor did not answer in time."""


class AgentFailed(AgentError):
    """The actor answered with an error of its own."""


async def within(seconds: float, answer: Awaitable[T]) -> T:
    """The answer of an agent. Raises AgentTimeout if it takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError as error:
        raise AgentTimeout(f"no answer in {seconds:g} s") from error


class RayActor:
    """An actor that answers `call`s."""

    def __init__(self, ray: Any, actor: Any):
        """`ray`: the module, connected; `actor`: a handle of an actor that has `call`."""
        self._ray, self.actor = ray, actor

    async def _call(self, method: Callable[..., Coroutine[Any, Any, T]], /, **arguments: Any) -> T:
        return await call(self._send, method, arguments)

    async def _send(self, method: str, arguments: JsonObject) -> Any:
        errors = self._ray.exceptions
        try:
            # By name: Ray does not know the signature of an actor whose class this release cannot load.
            return await self.actor.call.remote(method=method, arguments=arguments)
        except errors.RayError as error:
            if isinstance(error, StaleOwner):  # Ray's exception is also an instance of the actor's one
                raise
            message = (str(error).strip() or type(error).__name__).splitlines()[-1]
            kind = AgentFailed if isinstance(error, errors.RayTaskError) else AgentLost
            raise kind(message, type(error).__name__) from error


def forwards(calls: type) -> Callable[[type[A]], type[A]]:
    """Decorator of a class that stands for a `calls` elsewhere: it gets those public coroutine methods of `calls` that
    it does not define itself. Each sends the call with all of its arguments."""

    def with_methods(client: type[A]) -> type[A]:
        for name, method in inspect.getmembers(calls, inspect.iscoroutinefunction):
            if not name.startswith("_") and name != "call" and name not in vars(client):
                setattr(client, name, _forwarding(method))
        return client

    return with_methods


def _forwarding(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def forward(self: RayActor, *given: Any, **named: Any) -> T:
        bound = signature.bind(self, *given, **named)
        bound.apply_defaults()
        del bound.arguments["self"]
        return await self._call(method, **bound.arguments)

    return forward


OrderEpoch = Callable[[str, str | None], int | None]
"""The epoch that a call of a job's agent carries, given the job and the name of the call (`call_name`); None stands for
any other way to end or move what a job has. Raises LeaseLost, LeaseUncertain if the call is not permitted."""


class Calls(Protocol):
    """How calls to what is on a node are made (`manta.service.cluster.agents.CallsToNodes`)."""

    async def answer(self, node: str | None, call: Callable[[], Awaitable[T]]) -> T:
        """The answer to `call`. Raises AgentLost as soon as `node` is lost; None: not known."""
        ...


@forwards(Agent)
class AgentClient(RayActor, Agent):
    """The agent of one rank, over Ray. Every method raises AgentError."""

    _protocol = PROTOCOL
    """The protocol that the agent speaks, known once it has described itself."""

    def __init__(
        self,
        ray: Any,
        actor: Any,
        job: str = "",
        epoch: OrderEpoch | None = None,
        calls: Calls | None = None,
        node: str | None = None,
    ):
        """`job`, `epoch`: the agent's job, and what calls carry; None: there are no leases. `calls`: how they are made;
        None: without checking the nodes. `node`: where it is; None: not known until it has described itself."""
        super().__init__(ray, actor)
        self._job, self._epoch, self._calls, self._node = job, epoch, calls, node

    async def _send(self, method: str, arguments: JsonObject) -> Any:
        epoch = None if self._epoch is None else self._epoch(self._job, call_name(method, arguments))
        if epoch is not None:
            arguments = {**arguments, EPOCH: epoch}
        send = functools.partial(super()._send, method, arguments)
        try:
            return await (send() if self._calls is None else self._calls.answer(self._node, send))
        except StaleOwner as error:
            raise LeaseLost(self._job) from error

    def check_order(self) -> None:
        """Raise LeaseLost or LeaseUncertain if the agent may not be ended."""
        if self._epoch is not None:
            self._epoch(self._job, None)

    async def describe(self) -> AgentDescription:
        answer = await self._call(Agent.describe)
        check_protocol(f"the agent {answer.pid} on {answer.host}", answer.protocol, _OTHER_AGENT)
        self._protocol, self._node = answer.protocol, answer.node or self._node
        return answer

    async def launch(self, order: LaunchOrder) -> Launched:
        return await self._call(Agent.launch, order=replace(order, protocol=self._protocol))

    async def prepare(self, order: LaunchOrder) -> bool:
        return await self._call(Agent.prepare, order=replace(order, protocol=self._protocol))


@forwards(NodeDaemon)
class NodeClient(RayActor, NodeDaemon):
    """The daemon of one node, over Ray. Every method raises AgentError."""

    async def start(self) -> NodeDescription:
        return _checked(await self._call(NodeDaemon.start))

    async def describe(self) -> NodeDescription:
        return _checked(await self._call(NodeDaemon.describe))


def _checked(answer: NodeDescription) -> NodeDescription:
    check_protocol(f"the daemon of node {answer.node[:12]}", answer.protocol, _OTHER_DAEMON)
    return answer
