"""Starting a generation: the gang's agents get their orders, and are watched from then on. Requested traces are passed
on to them; a generation that ends before a trace has begun leaves it to the next one."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manta.service.cluster.agent_client import AgentError, AgentFailed, within
from manta.service.cluster.agents import query
from manta.service.cluster.sizes import max_ranks
from manta.service.job import rank_backups
from manta.service.job.actions import Launch
from manta.service.job.context import JobContext
from manta.service.job.generation import RunningGeneration
from manta.service.job.hangs_and_stragglers import HangWatch
from manta.service.job.inbox import Trace
from manta.service.job.planning import plan_generation
from manta.service.job.received_lines import ReceivedLines
from manta.service.job.report_writer import ReportWriter
from manta.service.job.resume import newest_state
from manta.service.recovery.durable_state import beginning_of
from manta.service.store import StepTrace, jobs, step_traces
from manta.service.store.ranks import EXITED, RUNNING, STARTING
from manta.workers.comm.grid import RankGrid
from manta.workers.comm.secret import SECRET_LENGTH
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.protocol.messages import AgentDescription, Endpoint, LaunchOrder, Resume, TraceOrder
from manta.workers.protocol.reports import REPAIR_SELF_TEST, Metrics, Report
from manta.workers.protocol.requests import RecordSteps
from manta.workers.system.threads import decided_threads, threads_of, with_threads

# If a launch takes longer, an agent does not answer. A node's first trainer waits for its zygote.
LAUNCH_SECONDS = 150.0
FROM_THE_START = Resume()
NEW_KEYS = (
    ("train", "log_every"),
    ("train", "lora"),
    ("data", "special_tokens"),
    ("parallel", "context_method"),
    ("parallel", "context_order"),
    ("parallel", "expert"),
    ("parallel", "expert_dispatch"),
    ("parallel", "expert_tensor"),
    ("model", "moe"),
    ("model", "latent_attention"),
)
"""Section and name of keys that 0.3.0 does not know, whose jobs are taken over."""
_TRACE_SECONDS = 10.0
INITIAL_WAIT_SECONDS = 0.05
MAX_WAIT_SECONDS = 2.0
"""Seconds before the first rank is asked again, if it could not pass a trace on: it is still starting, and its steps
may be short, or its agent is silent. Each wait is twice as long as the one before."""


class LaunchFailed(MantaError):
    """Agents failed before the generation had begun; the next attempt continues without them."""

    def __init__(self, silent: Mapping[int, str]):
        """`silent`: by rank why its agent did not answer."""
        self.unresponsive = dict(silent)
        rank, why = next(iter(silent.items()))
        others = f" and {len(silent) - 1} others" if len(silent) > 1 else ""
        super().__init__(f"rank {rank}{others} could not be launched ({why})")


async def launch_generation(job: JobContext, launch: Launch) -> RunningGeneration:
    """Begin the next generation with the present agents, and watch it. An agent that fails before the generation has
    begun raises LaunchFailed; afterwards it is one of the generation's deaths. Also raises AgentError,
    ClusterUnavailable and TimeoutError, and CheckpointsUnreadable if the state to resume from cannot be read now."""
    gang, record = job.gang, job.record
    where = await _describe_agents(job)
    if gang.threads is None:
        gang.threads = await _threads_for(job, where)
    culprit = None if launch.incident is None else launch.incident.culprit
    last = (None, None) if culprit is None else (culprit.kind, culprit.step)
    start = await newest_state(job, *last)
    resume = replace(start.resume, began=beginning_of(start.resume, await record.generations()))
    next_one = (await record.job()).generation + 1
    async with asyncio.timeout(LAUNCH_SECONDS):  # limits daemons and agents; the database may take any time
        store = await _start_store(job, where, next_one)
    expected = [_row(job, rank, place, next_one, None, STARTING) for rank, place in where.items()]
    generation = await record.begin(
        launch.cause, launch.counts, resume, start.source, gang.layout, launch.incident, expected
    )
    roll_backs, tests = await record.data_of("rolled_back"), await record.data_of(REPAIR_SELF_TEST)
    secret = secrets.token_hex(SECRET_LENGTH // 2)
    common = CommonOrder(
        generation,
        gang.spec,
        resume,
        store,
        roll_backs,
        secret,
        tries_repair=next_one == 1,
        repair_works=bool(tests and tests[-1].get("passed")),
        cause="" if next_one == 1 else launch.cause,
    )
    orders = {rank: order_for(job, rank, place, common) for rank, place in where.items()}
    running = watch_generation(job, generation, resume.step)
    try:
        await _send_orders(job, running, orders, where)
    except BaseException:
        await running.close()  # nothing else knows of it yet
        raise
    return running


async def _send_orders(
    job: JobContext,
    running: RunningGeneration,
    orders: Mapping[int, LaunchOrder],
    where: Mapping[int, AgentDescription],
) -> None:
    """Have all agents launch a generation that has begun, and note which of them did."""
    generation, agents = running.generation, job.gang.by_rank
    answers, silent = await query(agents, lambda rank, agent: agent.launch(orders[rank]), LAUNCH_SECONDS)
    started: dict[int, tuple[int | None, str]] = {rank: (answer.pid, RUNNING) for rank, answer in answers.items()}
    rows = [_row(job, rank, at, generation, *started.get(rank, (None, EXITED))) for rank, at in where.items()]
    kept = [rank for rank, answer in answers.items() if answer.kept]
    await job.record.launched(generation, time.time(), rows, kept)
    running.launched.set()
    for rank, why in silent.items():
        running.lose(rank, f"could not be launched ({why})")
    if not silent:
        await _begin_backups(job, where, generation)
    running.run_alongside(plan_generation(job, generation, where))


async def finish_launch(job: JobContext, generation: int, where: Mapping[int, AgentDescription]) -> None:
    """The rest of the launch of a generation whose agents were all reached by another control plane, which could not
    record that any more."""
    rows = [_row(job, rank, place, generation, place.trainer_pid, RUNNING) for rank, place in where.items()]
    await job.record.launched(generation, time.time(), rows, [])
    await _begin_backups(job, where, generation)


async def _begin_backups(job: JobContext, where: Mapping[int, AgentDescription], generation: int) -> None:
    if job.gang.spec.checkpoint.snapshots == "off":
        return
    nodes = [place.node or place.host for place in where.values()]
    gang = rank_backups.Ranks(list(job.gang.by_rank.values()), generation, job.gang.tag, job.gang.peers)
    await rank_backups.begin(gang, nodes)


def watch_generation(job: JobContext, generation: int, resume_step: int, taken_over: bool = False) -> RunningGeneration:
    """The gang during `generation`, which resumed at `resume_step`. `taken_over`: from another control plane, which may
    have received reports that this one has not."""
    gang, record = job.gang, job.record
    lines = ReceivedLines(job.cluster.paths.log_folder(job.id)) if job.logs is None else job.logs.lines
    writer = ReportWriter(record.store, record.id, generation, resume_step, lines, job.first_step)

    async def take(report: Report) -> None:
        hangs.note(report)
        if isinstance(report.payload, Metrics):
            await running.launched.wait()  # what is told of its first step includes who was launched for it
        await writer.take(report)

    kept = None if job.logs is None else job.logs.mark
    running = RunningGeneration(gang.agents, generation, gang.after, take, kept)
    if taken_over:
        running.launched.set()
    hangs = HangWatch(
        gang.agents,
        RankGrid(gang.layout).group,
        record.event,
        running.lose,
        gang.spec.recovery.stragglers,
        gang.stragglers_replaced,
    )
    running.run_alongside(hangs.run(look_first=taken_over))
    running.run_alongside(pass_traces_on(job, running))
    return running


@dataclass(frozen=True)
class CommonOrder:
    """The part of a generation's launch orders that is the same for all ranks."""

    generation: int
    spec: JobSpec
    """In the generation's layout."""
    resume: Resume = FROM_THE_START
    store: Endpoint | None = None
    """The rendezvous store; None: a single rank needs none."""
    roll_backs: Sequence[dict[str, Any]] = ()
    """Data of the events of steps that were rolled back."""
    secret: str | None = None
    """By which the ranks authenticate each other."""
    tries_repair: bool = False
    """Whether ranks on GPUs test repair in place over NCCL now, in the first generation of a job, since it depends on
    drivers, NCCL and the network of the nodes. If that fails, later generations do not. Links do not need it."""
    repair_works: bool = False
    """Whether they have tested it, and it worked."""
    cause: str = ""
    """Why the generation begins, in words; empty for a job's first one."""


def order_for(job: JobContext, rank: int, where: AgentDescription, common: CommonOrder) -> LaunchOrder:
    """The order for the agent of `rank`, which is at `where`."""
    paths, store = job.cluster.paths, common.store
    return LaunchOrder(
        job=job.id,
        generation=common.generation,
        rank=rank,
        spec=_as_sent(with_threads(common.spec, job.gang.threads or threads_of(common.spec))),
        store_host=store.host if store else None,
        store_port=store.port if store else None,
        secret=common.secret,
        snapshot_folder=str(paths.snapshot_folder(job.id)),
        checkpoint_folder=str(paths.checkpoint_folder(job.id)),
        resume=common.resume,
        cause=common.cause,
        roll_backs=tuple(common.roll_backs),
        device="cuda:0" if where.devices else "cpu",
        # A node's peak is that of its CPU: a rank with a GPU determines that of its GPU itself.
        peak_flops=None if where.devices else job.cluster.peak_flops.get(where.node or ""),
        in_place=common.repair_works or not where.devices,
        tries_repair=common.tries_repair and bool(where.devices) and job.gang.layout.world_size > 1,
    )


def _as_sent(spec: JobSpec) -> dict[str, Any]:
    """The spec as JSON, without new keys at their defaults: the trainers of an earlier release that are taken over
    refuse keys that they do not know."""
    document = spec.model_dump(mode="json")
    for section, key in NEW_KEYS:
        if document[section][key] == type(getattr(spec, section)).model_fields[key].default:
            del document[section][key]
    scaling = (document["model"]["rope"] or {}).get("scaling")
    if scaling is not None and scaling["mscale_all_dim"] is None:
        del scaling["mscale_all_dim"]
    return document


async def _describe_agents(job: JobContext) -> dict[int, AgentDescription]:
    """By rank the description of its agent."""
    agents = job.gang.by_rank
    where, silent = await query(agents, lambda rank, agent: agent.describe(), LAUNCH_SECONDS)
    if silent:
        places = {rank: await job.cluster.agents.node_of(agents[rank]) for rank in silent}
        job.gang.record_nodes({**{rank: place.node for rank, place in where.items()}, **places})
        raise LaunchFailed(silent)
    job.gang.record_placements(where)
    return where


async def _threads_for(job: JobContext, where: Mapping[int, AgentDescription]) -> int:
    """Decides the threads per rank of a job that starts for the first time, on these nodes, unless they are decided."""
    spec = job.submitted
    capacity = await job.cluster.nodes.capacity(await job.gang.unit(), all_living=True)
    units = {node: total for node, (total, _) in capacity.nodes.items()}
    on_cpu = {place.node or place.host: place.cores for place in where.values() if not place.devices}
    most = max_ranks(spec)
    threads = decided_threads(spec, [(cores, min(most, units.get(node) or most)) for node, cores in on_cpu.items()])
    return await job.record.write(lambda session: jobs.decide_threads(session, job.id, threads))


async def _start_store(job: JobContext, where: Mapping[int, AgentDescription], generation: int) -> Endpoint | None:
    """Start the rendezvous store of `generation`, the next one, on the node of rank 0."""
    if job.gang.layout.world_size == 1:
        return None
    node, daemons = where[0].node, job.cluster.daemons
    # If Ray's head is away, ranks with living agents need not wait for it.
    daemon = None if node is None else await daemons.known(node) or (await daemons.ensure()).get(node)
    if daemon is None:  # agents of a real cluster are always on a node
        raise LaunchFailed(dict.fromkeys(job.gang.on([str(node)]), f"the daemon of node {node} does not answer"))
    one_machine = len({(place.host, place.address) for place in where.values()}) == 1
    return await daemon.start_store(job.id, generation, one_machine)


def _row(
    job: JobContext, rank: int, where: AgentDescription, generation: int, pid: int | None, state: str
) -> dict[str, Any]:
    at = RankGrid(job.gang.layout).coordinates(rank)
    return {
        "rank": rank,
        "tensor": at.tensor,
        "pipeline": at.pipeline,
        "data": at.data,
        "context": at.context,
        "node": where.host,
        "device": f"GPU {where.devices[0]}" if where.devices else "cpu",
        "pid": pid,
        "generation": generation,
        "state": state,
        "actor": job.gang.names[rank],
    }


async def pass_traces_on(job: JobContext, running: RunningGeneration) -> None:
    """Have the ranks of `running` record requested traces. Until cancelled."""
    passed: set[int] = set()
    wait = INITIAL_WAIT_SECONDS
    while True:
        job.inbox.remove(Trace)
        wanted = await job.record.read(lambda session: step_traces.wanted(session, job.id))
        waiting = [each for each in wanted if each.number not in passed]
        for each in waiting:
            if await _passed_on(job, running, each):
                passed.add(each.number)
        again = any(each.number not in passed for each in waiting)
        await job.inbox.wait(Trace, seconds=wait if again else None)
        wait = min(2 * wait, MAX_WAIT_SECONDS) if again else INITIAL_WAIT_SECONDS


async def _passed_on(job: JobContext, running: RunningGeneration, wanted: StepTrace) -> bool:
    """Whether the first rank knows of it, and before it those to be profiled; or it was given up."""
    ranks = tuple(rank for rank in wanted.profiler_ranks if rank < len(running.agents))
    request = RecordSteps(TraceOrder(wanted.number, running.generation, wanted.steps, wanted.wanted_step, ranks))
    try:
        # The first one last: it makes all of them begin.
        for agent in (*(running.agents[rank] for rank in ranks if rank), running.agents[0]):
            if agent is None or not await within(_TRACE_SECONDS, agent.tell(request)):
                return False
        return True
    except AgentFailed as error:
        why = f"the job's ranks cannot be traced, perhaps since another release started them ({error})"
        await job.record.write(lambda session: step_traces.fail(session, job.id, wanted.number, why))
        return True
    except AgentError:
        return False
