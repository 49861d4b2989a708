"""What the control plane asks of agents and node daemons, and how it reaches them over Ray.

The rest of the service knows only `AgentClient` and `NodeClient`, and their errors: where a call goes, and what Ray
raises on the way, is known only here. Calls are sent as JSON (`workers/protocol/remote_call.py`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from manta.service.leases.decisions import LeaseLost
from manta.workers.errors import MantaError
from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.protocol.json_codec import JsonObject
from manta.workers.protocol.messages import (
    PROTOCOL,
    AgentDescription,
    Endpoint,
    Fault,
    Launched,
    LaunchOrder,
    ListeningPorts,
    NodeDescription,
    StoredSnapshot,
    TraceOrder,
    check_protocol,
)
from manta.workers.protocol.remote_call import EPOCH, StaleOwner, call
from manta.workers.protocol.reports import Report, TrainerStatus
from manta.workers.snapshot.backup import BackupProgress
from manta.workers.zygote.client import Exit

T = TypeVar("T")
_OTHER_AGENT = "a release of Manta that speaks it continues the job, or cancel the job"
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


class AgentClient(Protocol):
    """The agent of one rank (`manta.workers.rank.agent.Agent`). Every method raises AgentError."""

    async def describe(self) -> AgentDescription:
        """Where the agent is, and what runs under it. Raises ProtocolMismatch."""
        ...

    async def launch(self, order: LaunchOrder) -> Launched:
        """Start the trainer of a new generation."""
        ...

    async def prepare(self, order: LaunchOrder) -> bool:
        """Keep a trainer ready for an order like this one; returns whether it is ready."""
        ...

    async def arm(self, fault: Fault) -> None:
        """Have the rank's trainer carry out a fault when its time comes."""
        ...

    async def trace(self, order: TraceOrder) -> bool:
        """Have all ranks record steps, beginning with the same one; asked of rank 0. False if the trainer cannot tell
        the others. Agents of earlier releases do not support it: AgentFailed."""
        ...

    async def rest(self, generation: int, grace: float, patience: float = 0.0) -> bool:
        """Bring the trainer of `generation` to rest, after the current step if that ends within `patience` seconds;
        returns whether it rests. A trainer that does not within another `grace` seconds is killed."""
        ...

    async def save_and_end(self, generation: int) -> bool:
        """Have all ranks of `generation` save their state after the same step, and end; False if the trainer cannot
        tell the others."""
        ...

    async def progress(self) -> TrainerStatus | None:
        """The trainer's position and state; None if no trainer runs, or none is watched."""
        ...

    async def stacks(self, pid: int) -> str:
        """The stacks of the trainer `pid`; empty if it is not this agent's."""
        ...

    async def flight_record(self, pid: int) -> FlightRecord | None:
        """What NCCL's flight recorder in the trainer `pid` contains; None if it is not this agent's, or does not
        answer. Agents of earlier releases do not support it: AgentFailed."""
        ...

    async def kill(self, pid: int, kind: str, message: str, after_commit: bool = False) -> bool:
        """Kill the trainer `pid`, with `after_commit` after the next step that it commits; its exit report says why.
        False if it is not this agent's, has ended, or does not commit."""
        ...

    async def snapshot_steps(self, layout: str | None = None) -> list[int]:
        """Committed steps that are complete in the rank's shared memory, of `layout` (its tag) or of all layouts."""
        ...

    async def snapshot_files(self) -> list[StoredSnapshot]:
        """The job's snapshot files on the agent's node."""
        ...

    async def receive_backups(self, token: str, generation: int) -> Endpoint | None:
        """Accept backups from callers that know `token` and belong to `generation` or a later one, and hand out
        snapshots; returns the address. None without shared memory."""
        ...

    async def send_backups(self, partner: Endpoint, token: str, generation: int, layout: str, every: int = 1) -> None:
        """Stream the rank's snapshots to the agent at `partner` from now on; only steps that are a multiple of
        `every`."""
        ...

    async def stop_backups(self) -> None:
        """Stop sending snapshots."""
        ...

    async def backup_progress(self) -> BackupProgress | None:
        """The state of the rank's backup; None without a partner."""
        ...

    async def fetch_snapshot(
        self, rank: int, holder: Endpoint, token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        """Fetch the snapshots of `rank`, or those of `of`, which has the same state, from the agent at `holder`;
        returns the steps that arrived complete."""
        ...

    async def reports(self, after: int, timeout: float, kept: tuple[int, ...] | None = None) -> list[Report]:
        """Reports with a sequence number above `after`, at once or within `timeout` seconds. This acknowledges those up
        to `after`, which are forgotten; printed lines only up to `kept` (rank, generation, sequence) if that is
        given."""
        ...

    async def stop(self) -> Exit:
        """Kill the trainer; returns how it ended, `Exit(None, None)` if none ran."""
        ...

    async def close(self) -> None:
        """End the trainer and remove the rank's snapshots, before the agent itself is ended."""
        ...


class NodeClient(Protocol):
    """The daemon of one node (`manta.workers.node.daemon.NodeDaemon`). Every method raises AgentError."""

    async def start(self) -> NodeDescription:
        """Start the node's zygote unless it runs. Raises ProtocolMismatch."""
        ...

    async def describe(self) -> NodeDescription:
        """The node. Raises ProtocolMismatch."""
        ...

    async def drain(self, seconds: float) -> None:
        """Report from now on that the node is being drained within `seconds`."""
        ...

    async def undrain(self) -> str:
        """Report that it no longer is, as far as users have said so; returns why it is nevertheless, or nothing."""
        ...

    async def start_store(self, job: str, generation: int, one_machine: bool = False) -> Endpoint:
        """Serve a rendezvous store for the job's generation, all of whose ranks may be on this `one_machine`; returns
        the address."""
        ...

    async def end_job(self, job: str, keep_snapshots: bool = False) -> None:
        """Remove everything that the job has left on the node, or everything except its snapshots."""
        ...

    async def jobs(self) -> list[str]:
        """The jobs that have a store or snapshots on the node. Daemons of earlier releases do not support it:
        AgentFailed."""
        ...

    async def check_data(self, spec: JsonObject, roots: list[str] | None) -> str | None:
        """Why the job `spec` cannot be trained on its corpus there; None if it can. `roots`: folders below which jobs
        may read; None: anywhere."""
        ...

    async def listen_for_a_moment(self, count: int, seconds: float) -> ListeningPorts:
        """Accept connections on `count` of the node's ports for `seconds`; returns which."""
        ...

    async def unreached(self, addresses: list[Endpoint], seconds: float) -> list[Endpoint]:
        """Which of `addresses` accept no connection from the node within `seconds`."""
        ...

    async def shutdown(self) -> None:
        """End stores and the zygote; remove all snapshots."""
        ...


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
            return await self.actor.call.remote(method, arguments)
        except errors.RayError as error:
            if isinstance(error, StaleOwner):  # Ray's exception is also an instance of the actor's one
                raise
            message = (str(error).strip() or type(error).__name__).splitlines()[-1]
            kind = AgentFailed if isinstance(error, errors.RayTaskError) else AgentLost
            raise kind(message, type(error).__name__) from error


OrderEpoch = Callable[[str, str | None], int | None]
"""The epoch that a call of a job's agent carries, given the job and the call's method; method None stands for any other
way to end or move what a job has. Raises LeaseLost, LeaseUncertain if the call is not permitted."""


class Calls(Protocol):
    """How calls to what is on a node are made (`manta.service.cluster.agents.CallsToNodes`)."""

    async def answer(self, node: str | None, call: Callable[[], Awaitable[T]]) -> T:
        """The answer to `call`. Raises AgentLost as soon as `node` is lost; None: not known."""
        ...


class RayAgent(RayActor):
    """An AgentClient over a Ray actor."""

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
        epoch = None if self._epoch is None else self._epoch(self._job, method)
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
        answer = await self._call(AgentClient.describe)
        check_protocol(f"the agent {answer.pid} on {answer.host}", answer.protocol, _OTHER_AGENT)
        self._protocol, self._node = answer.protocol, answer.node or self._node
        return answer

    async def launch(self, order: LaunchOrder) -> Launched:
        return await self._call(AgentClient.launch, order=replace(order, protocol=self._protocol))

    async def prepare(self, order: LaunchOrder) -> bool:
        return await self._call(AgentClient.prepare, order=replace(order, protocol=self._protocol))

    async def arm(self, fault: Fault) -> None:
        await self._call(AgentClient.arm, fault=fault)

    async def trace(self, order: TraceOrder) -> bool:
        return await self._call(AgentClient.trace, order=order)

    async def rest(self, generation: int, grace: float, patience: float = 0.0) -> bool:
        return await self._call(AgentClient.rest, generation=generation, grace=grace, patience=patience)

    async def save_and_end(self, generation: int) -> bool:
        return await self._call(AgentClient.save_and_end, generation=generation)

    async def progress(self) -> TrainerStatus | None:
        return await self._call(AgentClient.progress)

    async def stacks(self, pid: int) -> str:
        return await self._call(AgentClient.stacks, pid=pid)

    async def flight_record(self, pid: int) -> FlightRecord | None:
        return await self._call(AgentClient.flight_record, pid=pid)

    async def kill(self, pid: int, kind: str, message: str, after_commit: bool = False) -> bool:
        return await self._call(AgentClient.kill, pid=pid, kind=kind, message=message, after_commit=after_commit)

    async def snapshot_steps(self, layout: str | None = None) -> list[int]:
        return await self._call(AgentClient.snapshot_steps, layout=layout)

    async def snapshot_files(self) -> list[StoredSnapshot]:
        return await self._call(AgentClient.snapshot_files)

    async def receive_backups(self, token: str, generation: int) -> Endpoint | None:
        return await self._call(AgentClient.receive_backups, token=token, generation=generation)

    async def send_backups(self, partner: Endpoint, token: str, generation: int, layout: str, every: int = 1) -> None:
        await self._call(
            AgentClient.send_backups, partner=partner, token=token, generation=generation, layout=layout, every=every
        )

    async def stop_backups(self) -> None:
        await self._call(AgentClient.stop_backups)

    async def backup_progress(self) -> BackupProgress | None:
        return await self._call(AgentClient.backup_progress)

    async def fetch_snapshot(
        self, rank: int, holder: Endpoint, token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        return await self._call(
            AgentClient.fetch_snapshot,
            rank=rank,
            holder=holder,
            token=token,
            generation=generation,
            layout=layout,
            of=of,
        )

    async def reports(self, after: int, timeout: float, kept: tuple[int, ...] | None = None) -> list[Report]:
        return await self._call(AgentClient.reports, after=after, timeout=timeout, kept=kept)

    async def stop(self) -> Exit:
        return await self._call(AgentClient.stop)

    async def close(self) -> None:
        await self._call(AgentClient.close)


class RayNodeDaemon(RayActor):
    """A NodeClient over a Ray actor."""

    async def start(self) -> NodeDescription:
        return _checked(await self._call(NodeClient.start))

    async def describe(self) -> NodeDescription:
        return _checked(await self._call(NodeClient.describe))

    async def drain(self, seconds: float) -> None:
        await self._call(NodeClient.drain, seconds=seconds)

    async def undrain(self) -> str:
        return await self._call(NodeClient.undrain)

    async def start_store(self, job: str, generation: int, one_machine: bool = False) -> Endpoint:
        return await self._call(NodeClient.start_store, job=job, generation=generation, one_machine=one_machine)

    async def end_job(self, job: str, keep_snapshots: bool = False) -> None:
        await self._call(NodeClient.end_job, job=job, keep_snapshots=keep_snapshots)

    async def jobs(self) -> list[str]:
        return await self._call(NodeClient.jobs)

    async def check_data(self, spec: JsonObject, roots: list[str] | None) -> str | None:
        return await self._call(NodeClient.check_data, spec=spec, roots=roots)

    async def listen_for_a_moment(self, count: int, seconds: float) -> ListeningPorts:
        return await self._call(NodeClient.listen_for_a_moment, count=count, seconds=seconds)

    async def unreached(self, addresses: list[Endpoint], seconds: float) -> list[Endpoint]:
        return await self._call(NodeClient.unreached, addresses=addresses, seconds=seconds)

    async def shutdown(self) -> None:
        await self._call(NodeClient.shutdown)


def _checked(answer: NodeDescription) -> NodeDescription:
    check_protocol(f"the daemon of node {answer.node[:12]}", answer.protocol, _OTHER_DAEMON)
    return answer
