"""Faults on request, for users who want to see a job survive them: refused unless the service was started with them.
Agents take them from every control plane, whichever one owns the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from manta.service.cluster.agent_client import AgentClient, AgentError, AgentFailed, within
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.placement import agent_name
from manta.service.cluster.sizes import in_use
from manta.service.errors import ErrorKind, ServiceError
from manta.service.states import SUPERVISED
from manta.service.store import Store, events, jobs, ranks
from manta.service.store.tables import Job
from manta.service.stored_specs import stored_spec
from manta.service.words import no_such_rank
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.protocol.json_codec import to_json
from manta.workers.protocol.messages import BETWEEN_STEPS, Fault
from manta.workers.protocol.requests import Arm

# Seconds after which an agent that is arming a fault counts as dead.
INJECT_SECONDS = 10.0


class FaultsNotAllowed(ServiceError):
    """This service does not inject faults."""

    kind = ErrorKind("faults_not_allowed", 403, "the service was started without --allow-faults")

    def __init__(self) -> None:
        super().__init__("this service does not inject faults; `manta up --allow-faults` starts one that does")


class FaultNotPossible(ServiceError):
    """The job cannot have this fault now; the message says why."""

    kind = ErrorKind("fault_not_possible", 409, "the fault could never happen")


class FaultNotConfirmed(MantaError):
    """The fault was sent to its agent, which has not said that it has taken it: it may still happen."""

    def __init__(self, rank: int):
        super().__init__(
            f"sent, but the agent of rank {rank} has not confirmed it yet; the event fault_struck says if it happens"
        )


class FaultInjector:
    """Has agents inject faults. Called on the control plane's own thread."""

    def __init__(self, store: Store, cluster: Cluster, owned: Callable[[str], Sequence[AgentClient | None]]):
        """`owned`: by rank, the agents of a job that this control plane owns; none of any other. For these Ray's head
        is not needed."""
        self._store, self._cluster, self._owned = store, cluster, owned

    async def inject(self, job_id: str, fault: Fault) -> None:
        """Have the agent of the fault's rank inject it. Raises JobNotFound, FaultNotPossible, FaultNotConfirmed,
        SpecNotUnderstood, ClusterUnavailable."""
        job, names = await asyncio.to_thread(self._job, job_id)
        spec = stored_spec(job).spec
        agents = self._owned(job_id) or await self._find(job, spec, names)
        refuse_impossible(fault, len(agents), job.step, spec.train.steps)
        agent = agents[fault.rank]
        if agent is None:
            raise FaultNotPossible(f"rank {fault.rank} is being replaced; try again")
        step, data = None if fault.phase in BETWEEN_STEPS else fault.at_step, to_json(fault)
        await self._store.write_async(
            lambda s: events.append(s, job_id, "fault_injected", fault.sentence, rank=fault.rank, step=step, data=data)
        )
        try:
            await within(INJECT_SECONDS, agent.tell(Arm(fault)))
        except AgentFailed as error:
            raise FaultNotPossible(f"the agent of rank {fault.rank} refused it: {error}") from error
        except AgentError as error:
            raise FaultNotConfirmed(fault.rank) from error

    def _job(self, job_id: str) -> tuple[Job, list[str]]:
        """A job that runs, and the names of the agents that its ranks had last."""
        with self._store.read() as session:
            job = jobs.get(session, job_id)
            if job.state not in SUPERVISED:  # its agents may not have ended yet
                raise FaultNotPossible(f"the job is {job.state}, and faults need a running job")
            return job, [row.actor or "" for row in ranks.of_job(session, job_id)]

    async def _find(self, job: Job, spec: JobSpec, names: list[str]) -> Sequence[AgentClient | None]:
        """By rank; none if the job has no agents."""
        agents = await self._cluster.agents.find(names)
        if not any(agents):  # those of a job that starts are recorded once all of them have answered
            world_size = in_use(spec, job).layout.world_size
            placed_for = [agent_name(job.id, job.generation + 1, rank) for rank in range(world_size)]
            agents = await self._cluster.agents.find(placed_for)
        return agents if any(agents) else []


def refuse_impossible(fault: Fault, ranks: int, step: int, steps: int) -> None:
    """Raise FaultNotPossible if `fault` could never occur in a job of `ranks` running ranks that has committed `step`
    of its `steps` steps."""
    if ranks == 0:
        raise FaultNotPossible("the job has no ranks yet; wait until it is RUNNING")
    if fault.rank >= ranks:
        raise FaultNotPossible(no_such_rank("the job", fault.rank, ranks))
    if fault.phase not in BETWEEN_STEPS and (fault.at_step > steps or step >= steps):
        raise FaultNotPossible(f"step {fault.at_step} will never start: the job has committed {step} of {steps} steps")
    if fault.kind == "store" and ranks == 1:
        raise FaultNotPossible("a job of one rank has no rendezvous store")
