"""Requested traces of a job: passed on to its ranks, of which the first notifies the others.

What is recorded comes back as reports. A generation that ends before a trace has begun leaves it to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib

from service.cluster.agent_client import AgentError, AgentFailed, within
from service.job.context import JobContext
from service.job.generation import RunningGeneration
from service.store import StepTrace
from workers.protocol.messages import TraceOrder

ASK_SECONDS = 10.0
FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0
"""Seconds before the first rank is asked again, if it could not pass a trace on: it is still starting, and its steps
may be short, or its agent is silent. Each wait is twice as long as the one before."""


async def pass_traces_on(job: JobContext, running: RunningGeneration) -> None:
    """Have the ranks of `running` record requested traces. Until cancelled."""
    passed: set[int] = set()
    wait = FIRST_WAIT_SECONDS
    while True:
        job.trace_wanted.clear()
        waiting = [each for each in await job.record.wanted_traces() if each.number not in passed]
        for each in waiting:
            if await _passed_on(job, running, each):
                passed.add(each.number)
        again = any(each.number not in passed for each in waiting)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait if again else None):
                await job.trace_wanted.wait()
        wait = min(2 * wait, LONGEST_WAIT_SECONDS) if again else FIRST_WAIT_SECONDS


async def _passed_on(job: JobContext, running: RunningGeneration, wanted: StepTrace) -> bool:
    """Whether the first rank knows of it, and before it those to be profiled; or it was given up."""
    ranks = tuple(rank for rank in wanted.profiler_ranks if rank < len(running.agents))
    order = TraceOrder(wanted.number, running.generation, wanted.steps, wanted.wanted_step, ranks)
    try:
        # The first one last: it makes all of them begin.
        for agent in (*(running.agents[rank] for rank in ranks if rank), running.agents[0]):
            if agent is None or not await within(ASK_SECONDS, agent.trace(order)):
                return False
        return True
    except AgentFailed as error:
        why = f"the job's ranks cannot be traced, perhaps since another release started them ({error})"
        await job.record.fail_trace(wanted.number, why)
        return True
    except AgentError:
        return False
