"""Whether this release can take over the running jobs: checked before the database is migrated to a schema that the
release under which they run cannot use. Otherwise no control plane could own them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from manta.service.cluster.agent_client import AgentClient, AgentError, within
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.placement import job_of
from manta.service.states import JobState, is_final
from manta.workers.errors import MantaError
from manta.workers.protocol.messages import SPOKEN, ProtocolMismatch

REQUEST_SECONDS = 10.0
MAX_NAMED = 5
_NOT_RUNNING = (JobState.QUEUED, JobState.CANCELLING)


class CannotTakeOver(MantaError):
    """Jobs run under a release whose agents this one does not understand, and which could not continue with them either
    once this one has started."""

    def __init__(self, protocols: Mapping[str, int]):
        """`protocols`: by job, the protocol of its agents."""
        jobs = sorted(protocols)
        more = f" and {len(jobs) - MAX_NAMED} more" if len(jobs) > MAX_NAMED else ""
        theirs, ours = (" and ".join(map(str, sorted(each))) for each in ({*protocols.values()}, SPOKEN))
        super().__init__(
            f"cannot take over {', '.join(jobs[:MAX_NAMED])}{more}: their agents speak protocol {theirs} and this "
            f"release of Manta {ours}. Nothing was changed and they train on, but their release could not use the "
            "database any more once this one had brought it up to date. Start their release again and let them finish, "
            "or end their processes with `manta down`: this release continues them from their newest checkpoints "
            "(docs/operations.md, Upgrades)"
        )


async def refuse_incompatible_agents(
    cluster: Cluster, states: Callable[[Collection[str]], Mapping[str, JobState]]
) -> None:
    """Ask all agents for their protocol. `states`: the states of those of these jobs that the database knows. An agent
    that does not answer says nothing about its release. Raises CannotTakeOver, ClusterUnavailable."""
    names = await cluster.agents.names()
    known = await asyncio.to_thread(states, {job for name in names if (job := job_of(name)) is not None})
    running = {job for job, state in known.items() if not is_final(state) and state not in _NOT_RUNNING}
    asked = [name for name in names if job_of(name) in running]
    agents = await cluster.agents.find(asked)
    protocols = await asyncio.gather(*(_foreign_protocol(agent) for agent in agents))
    foreign = {str(job_of(name)): theirs for name, theirs in zip(asked, protocols, strict=True) if theirs is not None}
    if foreign:
        raise CannotTakeOver(foreign)


async def _foreign_protocol(agent: AgentClient | None) -> int | None:
    """The protocol of an agent, if we do not speak it."""
    if agent is None:
        return None
    try:
        await within(REQUEST_SECONDS, agent.describe())
    except ProtocolMismatch as error:
        return error.theirs
    except AgentError:
        return None
    return None
