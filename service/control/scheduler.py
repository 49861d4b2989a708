"""Admission: checks queued jobs in order, and their data, and places the ones that fit.

Strictly first come, first served within a priority: a job that fits the cluster, but not now, holds back those behind
it that take the same resource (GPUs, or slots), so that small jobs cannot starve large ones. A job that the cluster
could never hold steps aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from manta.service.cluster.cluster import Cluster
from manta.service.cluster.errors import ClusterUnavailable, needs_traceback
from manta.service.cluster.node_shapes import Demand, describe_growth
from manta.service.cluster.placement import UNITS, Shortage, Unit, insufficient, missing, plural_of, unit_of
from manta.service.cluster.placement_groups import NotPlaced
from manta.service.cluster.sizes import fitting, resized, shapes_of, smallest
from manta.service.control.data_checks import DataChecks, DataTimeout, local_problem
from manta.service.job.record import JobRecord
from manta.service.leases.decisions import LeaseLost
from manta.service.leases.held import Leases
from manta.service.states import JobState
from manta.service.store import Store, checkpoints, jobs
from manta.service.store.database import may_pass
from manta.service.store.errors import IllegalTransition, JobNotFound
from manta.service.store.tables import Job
from manta.service.stored_specs import SpecNotUnderstood, stored_spec
from manta.service.tasks import Lag
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.data.roots import ANYWHERE, DataRoots
from manta.workers.errors import MantaError

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
PLACEMENT_SECONDS = 10.0
RETRY_SECONDS = 60.0
"""How long the finding that the cluster could never hold a job stays valid: there may be thousands of such jobs."""


class PlacementDecision(Enum):
    """What the scheduler has decided about a queued job."""

    DONE = "it is placed, or no longer queued"
    SKIPS = "it waits, and those behind it do not wait for it"
    NEVER_FITS = "the same, until it or the cluster is another one"
    BLOCKS = "it waits, and so do those behind it that take the same"


OnPlaced = Callable[[Job, int], None]
"""Called with a job that is STARTING and the generation number that its placement groups carry."""


class Scheduler:
    """The owner loop of QUEUED jobs."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        placed: OnPlaced,
        data_roots: DataRoots = ANYWHERE,
        leases: Leases | None = None,
    ):
        """`placed`: see `OnPlaced`; `data_roots`: folders below which jobs may read; `leases`: the lease of a placed
        job is held from then on. None: this is the only control plane."""
        self._leases = leases
        self._store, self._cluster, self._placed, self._data_roots = store, cluster, placed, data_roots
        self._data_checks = DataChecks(self._check_data)
        self._queue: list[jobs.QueuedJob] = []
        """The queue as of the last check."""
        self._valid_data: set[str] = set()
        """Queued jobs whose data was fine when they first had their turn: it is checked again before they are placed,
        and not every second until then."""
        self._never_fitted: dict[str, tuple[float, object]] = {}
        """For each job that the cluster could never hold: when that was found, in seconds of the monotonic clock, and
        for which job and cluster."""
        self._wake = asyncio.Event()
        self.lag = Lag()
        """How long something in the queue has waited for a check."""
        self._demand: Demand | None = None
        """What the jobs that wait in this check of the queue need; None: no check in progress, or no autoscaler."""
        self.not_released: Collection[str] = ()
        """Jobs that held something before they were queued which cannot be released yet."""
        self.placing: set[str] = set()
        """Jobs that are STARTING and have no owner yet, because they are being placed."""

    def wake(self) -> None:
        """Something has changed: a job arrived, or capacity was lost."""
        self.lag.asked()
        self._wake.set()

    async def run(self) -> None:
        """Check the queue whenever woken, and regularly for capacity that others have given back."""
        try:
            await self._check_repeatedly()
        finally:
            with contextlib.suppress(ClusterUnavailable):  # otherwise the request disappears with this process
                await self._cluster.requests.withdraw()

    async def _check_repeatedly(self) -> None:
        while True:
            self._wake.clear()
            self.lag.begin()
            try:
                waiting = await self._round()
                self.lag.done()
            except LeaseLost:
                raise
            except Exception as error:  # the owner of all queued jobs must not end: check again in a moment
                log.error("checking the queue failed: %s", error, exc_info=needs_traceback(error))
                waiting = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS if waiting else None):
                    await self._wake.wait()

    async def _round(self) -> bool:
        """One pass over the queue; returns whether jobs still wait. Nodes that can be added are requested."""
        self._demand = None
        await self._cluster.requests.settle()
        waiting = await self._admit()
        demand: Demand | None = self._demand
        await self._cluster.requests.request(demand.bundles if demand is not None else (), self._cluster.nodes.closed)
        return waiting

    async def _admit(self) -> bool:
        waiting, behind = False, set[Unit]()
        queued = self._queue = await self._store.read_async(partial(jobs.queued, before=self._queue))
        self._keep_only({each.id for each in queued})
        has_gpus = await self._cluster.nodes.has_gpus() if queued else False
        could_be = [await self._cluster.nodes.at_most(unit) for unit in UNITS] if queued else []
        totals = [({node: total for node, (total, _) in each.nodes.items()}, each.types) for each in could_be]
        for each in queued:
            unit, about = unit_of(each.accelerator, has_gpus), (each.updated_at, totals)
            if self._never_fits_still(each.id, about):
                waiting = True
                continue
            if unit in behind and (self._demand is None or self._demand.is_over):
                continue
            try:
                job = await self._store.read_async(partial(_if_queued, job_id=each.id))
                if job is None:
                    continue
                outcome = await (self._request_nodes_ahead(job) if unit in behind else self._schedule(job))
            except Exception as error:  # one job must not keep those behind it waiting
                if may_pass(error) or isinstance(error, ClusterUnavailable | LeaseLost):
                    raise
                log.exception("%s could not be checked", each.id)
                waiting = True
                continue
            waiting = waiting or outcome is not PlacementDecision.DONE
            if outcome is PlacementDecision.NEVER_FITS:
                self._never_fitted[each.id] = time.monotonic(), about
            if outcome is PlacementDecision.BLOCKS:
                behind.add(unit)
        return waiting

    def _never_fits_still(self, job_id: str, about: object) -> bool:
        since, what = self._never_fitted.get(job_id, (-RETRY_SECONDS, None))
        return what == about and time.monotonic() - since < RETRY_SECONDS

    async def _schedule(self, job: Job) -> PlacementDecision:
        spec = await self._read_spec(job)
        if spec is None:
            return PlacementDecision.SKIPS
        if job.id in self.not_released:
            why = "resources that it held before it was queued cannot be released (see the service's log); retrying"
            await self._report_waiting_reason(job, None, "not_released", why)
            return PlacementDecision.SKIPS
        # Looking at thousands that never fit, such as all while no node answers, would hold up those behind them.
        needs_no_look = job.id in self._valid_data or await self._never_fits(spec)
        if needs_no_look or self._cluster.nodes.at_rest:
            shortage = await self._shortage(await self._sized(job, spec))
            if shortage is None:
                await self._cluster.daemons.wake()
            elif needs_no_look:
                await self._keep_waiting(job, spec, shortage)
                return await self._waits(spec)
        try:
            if not await self._has_valid_data(job, spec):
                return PlacementDecision.DONE
        except DataTimeout as error:
            return await self._wait_for_data(job, error)
        self.placing.add(job.id)
        try:
            if await self._try_to_place(job, spec):
                return PlacementDecision.DONE
        finally:
            self.placing.discard(job.id)
        return await self._waits(spec)

    async def _waits(self, spec: JobSpec) -> PlacementDecision:
        return PlacementDecision.NEVER_FITS if await self._never_fits(spec) else PlacementDecision.BLOCKS

    async def _request_nodes_ahead(self, job: Job) -> PlacementDecision:
        """Have nodes requested for a job that will have its turn later."""
        spec = await self._read_spec(job)
        if spec is not None and not await self._never_fits(spec):
            await self._request_nodes(job, spec)
        return PlacementDecision.BLOCKS

    async def _request_nodes(self, job: Job, spec: JobSpec) -> int | None:
        """For how many ranks of the job nodes are requested: as many as it may have and could get; None if none are
        requested."""
        if not self._cluster.nodes.shapes:
            return None
        if self._demand is None:
            self._demand = Demand({unit: await self._cluster.nodes.at_most(unit) for unit in UNITS})
        unit = await self._unit(spec)
        wanted = job.wanted_replicas or spec.layout.data
        largest = fitting(shapes_of(spec), wanted, self._demand.left(unit)) or smallest(spec)
        return largest.layout.world_size if self._demand.add(largest.layout, unit) else None

    def _keep_only(self, job_ids: set[str]) -> None:
        """Forget what is known about the data of other jobs."""
        self._data_checks.keep_only(job_ids)
        self._valid_data &= job_ids
        self._never_fitted = {job: known for job, known in self._never_fitted.items() if job in job_ids}

    async def _read_spec(self, job: Job) -> JobSpec | None:
        """The job's spec; None if this release does not understand the spec that another release stored: the job says
        so and waits."""
        try:
            return stored_spec(job).spec
        except SpecNotUnderstood as error:
            await self._report_waiting_reason(job, None, "invalid_spec", str(error))
            return None

    async def _has_valid_data(self, job: Job, spec: JobSpec) -> bool:
        begins = await self._store.read_async(lambda session: checkpoints.newest(session, job.id)) is None
        problem = await self._data_checks.problem(job.id, spec, begins)
        if problem is not None:
            await self._transition(job, JobState.FAILED, "bad_data", problem)
            return False
        self._valid_data.add(job.id)
        return True

    async def _wait_for_data(self, job: Job, error: DataTimeout) -> PlacementDecision:
        if error.keeps_turn:
            return PlacementDecision.BLOCKS
        await self._report_waiting_reason(job, None, "data_silent", str(error))
        return PlacementDecision.SKIPS

    async def _check_data(self, spec: JobSpec, begins: bool) -> str | None:
        """Why a job cannot be trained on its data. None also if no node can say: the ranks will find out."""
        if not self._cluster.is_remote:
            return await local_problem(self._data_roots, spec, begins)
        return await self._cluster.daemons.problem_of_data(spec.model_dump(mode="json"), self._data_roots.names, begins)

    async def _unit(self, spec: JobSpec) -> Unit:
        return unit_of(spec.resources.accelerator, await self._cluster.nodes.has_gpus())

    async def _shortage(self, spec: JobSpec) -> Shortage | None:
        return missing(spec.layout, await self._cluster.nodes.capacity(await self._unit(spec)))

    async def _never_fits(self, spec: JobSpec) -> bool:
        """Whether even its smallest layout would not fit if no other job held anything, and all nodes that can be added
        were there."""
        shortage = missing(smallest(spec).layout, await self._cluster.nodes.at_most(await self._unit(spec)))
        return shortage is not None and shortage.can_never_fit

    async def _describe_growth(self, job: Job, spec: JobSpec, unit: Unit) -> str:
        """What is requested of an autoscaler for a waiting job, or why nothing is; empty if there is no autoscaler."""
        shapes = self._cluster.nodes.shapes
        if not shapes:
            return ""
        if await self._never_fits(spec):
            if spec.layout.stage_accelerators is not None:
                return "; which GPUs nodes of the autoscaler have is not known, so none are requested: start some"
            return f"; that would be too little even with all that can be added: {describe_growth(shapes, unit)}"
        asked = await self._request_nodes(job, spec)
        if asked is None:
            return f"; running jobs use too much of what can be added: {describe_growth(shapes, unit)}"
        return f"; nodes for {asked} of them are requested: {describe_growth(shapes, unit)}"

    async def _sized(self, job: Job, spec: JobSpec) -> JobSpec:
        """`spec` with the requested number of replicas, or if `elastic` allows it in the largest layout that there is
        room for: the job grows when there is more."""
        wanted = job.wanted_replicas or spec.layout.data
        largest = fitting(shapes_of(spec), wanted, await self._cluster.nodes.capacity(await self._unit(spec)))
        return largest or resized(spec, wanted)

    async def _keep_waiting(self, job: Job, spec: JobSpec, shortage: Shortage) -> None:
        kind = plural_of(shortage.unit).lower()
        # A job that waits for another cluster is looked at only now and then: it does not report what others hold.
        available = shortage.possible if shortage.can_never_fit else shortage.available
        waiting_for = {"unit": kind, "needed": shortage.needed, "available": available}
        if not shortage.can_never_fit:
            waiting_for["free"] = shortage.free
        growth = await self._describe_growth(job, spec, shortage.unit) or await self._describe_other_unit(spec)
        why = _waiting_reason(
            f"{shortage}{self._describe_closed_ports()}{growth}", list(self._cluster.nodes.problems.values())
        )
        reason = insufficient(shortage.unit)
        await self._report_waiting_reason(job, waiting_for, reason, why)

    async def _report_waiting_reason(self, job: Job, waiting_for: dict[str, Any] | None, reason: str, why: str) -> None:
        """Have the job say why it waits, unless it says so already: it was read in this check of the queue."""
        if (job.waiting_for, job.reason, job.message) != (waiting_for, reason, why):
            await self._store.write_async(lambda s: jobs.set_waiting(s, job.id, waiting_for, reason, why))

    async def _describe_other_unit(self, spec: JobSpec) -> str:
        """What a job that waits in vain for GPUs could do instead; empty for any other job."""
        if await self._unit(spec) != "GPU" or not await self._never_fits(spec):
            return ""
        slots = await self._cluster.nodes.at_most("manta_slot")
        shortage = missing(smallest(spec).layout, slots)
        if shortage is not None and shortage.can_never_fit:
            return ""
        return "; with resources.accelerator: cpu it would run on CPU slots, of which there are enough"

    async def _try_to_place(self, job: Job, submitted: JobSpec) -> bool:
        spec = await self._sized(job, submitted)
        shortage = await self._shortage(spec)
        if shortage is not None:
            await self._keep_waiting(job, submitted, shortage)
            return False
        unit = await self._unit(spec)
        accelerator = "gpu" if unit == "GPU" else "cpu"
        await self._store.until_certain()
        try:
            if not await self._transition(job, JobState.STARTING, layout=spec.layout, accelerator=accelerator):
                return True
        except _NotYetReleased:
            return False
        generation = job.generation + 1
        try:
            avoid = await JobRecord(self._store, job.id).avoided_nodes()
            await self._cluster.groups.acquire(job.id, generation, spec.layout, unit, PLACEMENT_SECONDS, avoid)
        except Exception as error:  # a job that is STARTING without an owner that starts it would stay in that state
            if not isinstance(error, NotPlaced | ClusterUnavailable):
                log.exception("%s could not be placed", job.id)
            if await self._transition(job, JobState.QUEUED, insufficient(unit), str(error)):
                if self._leases is not None:
                    await self._leases.release(job.id)
                return False
            # It was cancelled in the meantime; its supervisor ends it.
        self._placed(job, generation)
        return True

    def _describe_closed_ports(self) -> str:
        leaving = len(self._cluster.nodes.draining)
        which = "a node that is being drained takes" if leaving == 1 else f"{leaving} nodes that are being drained take"
        return f"; {which} no job" if leaving else ""

    async def _transition(
        self,
        job: Job,
        to: JobState,
        reason: str | None = None,
        message: str | None = None,
        layout: ParallelConfig | None = None,
        accelerator: str = "auto",
    ) -> bool:
        """False if the user's change came first. `layout`, `accelerator`: what it is placed with."""

        def change(session: Any) -> int | None:
            jobs.transition(session, job.id, to, reason=reason, message=message)
            if layout is None:
                return None
            jobs.set_layout(session, job.id, layout)
            jobs.decide_accelerator(session, job.id, accelerator)
            if self._leases is None:
                return None
            epoch = self._leases.claim_within(session, job.id)
            if epoch is None:
                raise _NotYetReleased
            return epoch

        try:
            epoch = await self._store.write_async(change)
        except IllegalTransition:
            return False
        if self._leases is not None and epoch is not None:
            self._leases.hold(job.id, epoch)
        return True


def _if_queued(session: Session, job_id: str) -> Job | None:
    """The job; None if it is no longer in the queue."""
    try:
        job = jobs.get(session, job_id)
    except JobNotFound:
        return None
    return job if job.state == JobState.QUEUED else None


def _waiting_reason(shortage: str, problems: Sequence[str]) -> str:
    """Why a job waits: what it lacks, and what is wrong with nodes."""
    if not problems:
        return shortage
    others = f" (and {len(problems) - 1} more nodes with problems)" if len(problems) > 1 else ""
    return f"{shortage}; {problems[0]}{others}"


class _NotYetReleased(MantaError):
    """The job's previous owner has not quite left it."""
