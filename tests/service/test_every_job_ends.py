"""Whatever happens to a job, to its agents, its nodes, its database and its control planes: somebody owns it in every
state, it gets out of each in limited time, it is never trained twice at a time, and it ends with every step committed.

Drawn at random and played in virtual time; the control plane is the real one, the cluster exists on paper.
"""

import asyncio
import contextlib
import random
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from sqlalchemy.exc import OperationalError

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.placement_groups import NotPlaced
from manta.service.control import control_plane
from manta.service.control.control_plane import ControlPlane
from manta.service.control.owners import JobOwners
from manta.service.job.context import DEFAULT_MEMORY_SECONDS
from manta.service.job.inbox import Cancel, Pause, Resize
from manta.service.job.supervisor import Supervisor
from manta.service.leases.decisions import RENEW_SECONDS
from manta.service.leases.held import Leases
from manta.service.states import TIME_LIMITS, JobState, is_final
from manta.service.store import Store, events, jobs, leases, pauses_and_retries
from manta.service.store.errors import IllegalTransition
from manta.service.tasks import Lag
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.simulated_training import SimulatedTraining
from tests.service.support.virtual_time import in_virtual_time

JOBS = 3
STEPS = 60
TROUBLE_SECONDS = 50.0
"""How long things go wrong; a job alone would need about 30 s."""
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 1800.0
TAKEN_OVER_AFTER = {"ray_does_not_answer", "database_is_away", "supervisor_errs", "kill_control_plane"}
"""Jobs keep their owners if nothing of this happens."""


class IdleNodeWatch:
    """Nodes are lost and found by this test."""

    def __init__(self, cluster, lost, draining):
        self.lag = Lag()

    async def run(self):
        await asyncio.Event().wait()


class LeasesInVirtualTime(Leases):
    """They are renewed on the loop: the thread that does so otherwise would go by another clock."""

    _renewing: asyncio.Task | None = None

    def begin(self):
        if not self.alone:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def leave(self):
        if self._renewing is not None:
            self._renewing.cancel()
        await super().leave()

    async def _renew(self):
        while True:
            with contextlib.suppress(OperationalError):
                requested_at = self._clock()
                self._record_renewal(requested_at, self._store.write(lambda session: leases.renew(session, self.me)))
            await asyncio.sleep(RENEW_SECONDS)


class Trouble:
    """What goes wrong, drawn from a seed."""

    def __init__(self, seed, tmp_path, store, submit, monkeypatch):
        self.draw, self.home, self.store, self.monkeypatch = random.Random(seed), tmp_path, store, monkeypatch
        self.cluster = FakeCluster(tmp_path, node_a=8, node_b=8)
        self.training = SimulatedTraining(self.cluster)
        monkeypatch.setattr(control_plane, "NodeWatch", IdleNodeWatch)
        self.one_at_a_time = asyncio.Lock()
        self.database_answers = True
        self._make_refusing(store)
        self.slowest_answer = 0.0
        self._make_slow(store)
        self.errors = 0
        self._make_supervisors_err()
        layouts = ({"tensor": 2, "data": 2}, {"pipeline": 2, "data": 2}, {"data": 3})
        self.jobs = [
            submit(
                parallel=layout,
                elastic={"min_data": 1, "max_data": 3},
                train={"steps": STEPS, "global_batch_size": 12},
                recovery={"max_restarts": 1000},
                checkpoint={"every_steps": 0},
            ).id
            for layout in layouts
        ]
        self.history = []

    def _make_refusing(self, store):
        submit, session = store._submit, store._read_session

        def refuse():
            if not self.database_answers:
                raise OperationalError("anything", {}, Exception("database is locked"))

        def refused_submit(operation):
            refuse()
            return submit(operation)

        def refused_session():
            refuse()
            return session()

        store._submit, store._read_session = refused_submit, refused_session

    def _make_slow(self, store):
        def slowly(method):
            async def answer(operation):
                result = await getattr(Store, method)(store, operation)
                if self.slowest_answer:
                    await asyncio.sleep(self.draw.uniform(0.0, self.slowest_answer))
                return result

            return answer

        store.write_async, store.read_async = slowly("write_async"), slowly("read_async")

    def _make_supervisors_err(self):
        perform = Supervisor._perform

        async def broken(supervisor, action):
            if self.errors:
                self.errors -= 1
                raise RuntimeError("nobody expected this")
            return await perform(supervisor, action)

        self.monkeypatch.setattr(Supervisor, "_perform", broken)

    # The control plane.

    async def start_control_plane(self):
        """Another one, with the database and the agents that are there."""
        plane = ControlPlane(self.home, SimpleNamespace())
        plane.store.close()
        plane.store, plane._loop = self.store, asyncio.get_running_loop()
        plane._leases = LeasesInVirtualTime(self.store, plane._leases.me, time.monotonic)
        plane._owners = JobOwners(self.store, plane._leases, DEFAULT_MEMORY_SECONDS)
        while True:
            try:
                await plane._begin(self.cluster)
                break
            except OperationalError:  # whoever started it starts it again
                await plane._leave()
                await asyncio.sleep(1.0)
        self.plane = plane

    async def kill_control_plane(self):
        async with self.one_at_a_time:
            await self.plane._leave()
            await asyncio.sleep(self.draw.uniform(0.0, 5.0))
            await self.start_control_plane()

    # What goes wrong. Each returns at once, or when it is over.

    def _agent(self):
        living = [agent for _, agent in sorted(self.cluster.agents.living.items()) if not agent.lost]
        return self.draw.choice(living) if living else None

    async def rank_dies(self):
        if (agent := self._agent()) is not None and agent.running:
            agent.die()

    async def rank_raises(self):
        if (agent := self._agent()) is not None and agent.running:
            agent.fail("exception", step=max(agent.steps, default=0) + 1, message=f"error {self.draw.random()}")

    async def rank_hangs(self):
        if (agent := self._agent()) is not None and agent.running:
            agent.hung = agent.generation

    async def agent_dies(self):
        if (agent := self._agent()) is not None:
            self.cluster.agents.living.pop(agent.name)
            agent.lose()

    async def agent_refuses(self):
        if (agent := self._agent()) is not None:
            method = self.draw.choice(["launch", "prepare", "rest", "describe", "snapshot_steps", "reports"])
            agent.refuse(method, "cannot do that now")

    async def agent_falls_silent(self):
        if (agent := self._agent()) is not None:
            agent.silence()

    async def node_is_lost(self):
        node = self.draw.choice(["node_a", "node_b"])
        if self.cluster.nodes.lost:
            return
        self.cluster.lose_node(node)
        self.plane._node_lost(node, "its cable was pulled")
        await asyncio.sleep(self.draw.uniform(5.0, 30.0))
        self.cluster.nodes.lost.discard(node)

    async def node_is_left(self):
        node = self.draw.choice(["node_a", "node_b"])
        self.plane._node_draining(node, 60.0)
        await asyncio.sleep(self.draw.uniform(5.0, 30.0))
        self.cluster.nodes.draining.discard(node)

    async def ray_does_not_answer(self):
        self.cluster.nodes.error = ClusterUnavailable(TimeoutError("no answer"))
        refusal = self.draw.choice([ClusterUnavailable(TimeoutError("no answer")), NotPlaced("there is no room")])
        self.cluster.groups.refuse = Mock(side_effect=refusal)
        await asyncio.sleep(self.draw.uniform(0.0, 20.0))
        self.cluster.groups.refuse = lambda: None

    async def daemon_does_not_answer(self):
        node = self.draw.choice(["node_a", "node_b"])
        self.cluster.daemons.silent.add(node)
        await asyncio.sleep(self.draw.uniform(0.0, 20.0))
        self.cluster.daemons.silent.discard(node)

    async def database_is_away(self):
        self.database_answers = False
        await asyncio.sleep(self.draw.uniform(0.1, 60.0))
        self.database_answers = True

    async def database_is_slow(self):
        """What it has done is heard of later."""
        self.slowest_answer = self.draw.choice([0.05, 0.5, 3.0])
        await asyncio.sleep(self.draw.uniform(1.0, 60.0))
        self.slowest_answer = 0.0

    async def supervisor_errs(self):
        self.errors += self.draw.randint(1, 3)

    async def user_resizes(self):
        job, replicas = self.draw.choice(self.jobs), self.draw.randint(1, 3)
        with contextlib.suppress(IllegalTransition, OperationalError):
            self.store.write(lambda s: jobs.request_resize(s, job, replicas))
            self.plane._tell_owner(job, Resize())

    async def user_pauses(self):
        job = self.draw.choice(self.jobs)
        with contextlib.suppress(IllegalTransition, OperationalError):
            self.store.write(lambda s: pauses_and_retries.request_pause(s, job))
            self.plane._tell_owner(job, Pause())
            await asyncio.sleep(self.draw.uniform(0.0, 30.0))
            await self.user_resumes(job)

    async def user_resumes(self, job):
        with contextlib.suppress(IllegalTransition, OperationalError):
            self.store.write(lambda s: pauses_and_retries.request_resume(s, job))
            self.plane._wake_scheduler()

    async def user_cancels(self):
        job = self.jobs[0]
        with contextlib.suppress(IllegalTransition, OperationalError):
            self.store.write(lambda s: jobs.request_cancel(s, job))
            self.plane._tell_owner(job, Cancel())

    WAYS = (
        *(rank_dies, rank_raises, rank_hangs, agent_dies, agent_refuses, agent_falls_silent),
        *(node_is_lost, node_is_left, ray_does_not_answer, daemon_does_not_answer, database_is_away),
        *(database_is_slow, supervisor_errs, kill_control_plane, user_resizes, user_pauses),
    )

    async def befall(self):
        """Everything that was drawn; return when it is over."""
        ways = self.draw.choices(self.WAYS, k=self.draw.randint(1, 10))
        if self.draw.random() < 0.3:
            ways.append(type(self).user_cancels)
        async with asyncio.TaskGroup() as tasks:
            for way in ways:
                tasks.create_task(self._later(way))
        self.errors = 0

    async def _later(self, way):
        await asyncio.sleep(self.draw.uniform(0.0, TROUBLE_SECONDS))
        self.history.append((round(asyncio.get_running_loop().time(), 1), way.__name__))
        await way(self)

    def taken_over(self):
        """What was said of another owner's taking over."""
        with self.store.read() as session:
            said = [event for job in self.jobs for event in events.page(session, job, limit=1000).items]
        return [e.message for e in said if e.type == "adopted" or "control plane was restarted" in e.message]

    def rows(self):
        with self.store.read() as session:
            return [jobs.get(session, job) for job in self.jobs]


async def all_end(trouble):
    """Once nothing goes wrong any more each state is left within its limit, where it has one, and each job ends."""
    loop = asyncio.get_running_loop()
    over, since = loop.time(), {}
    trouble.history.append((round(over, 1), "all is well"))
    while not all(is_final(row.state) for row in trouble.rows()):
        await asyncio.sleep(POLL_SECONDS)
        for row in trouble.rows():
            if row.state == "PAUSED":
                await trouble.user_resumes(row.id)
        assert loop.time() - over < PATIENCE_SECONDS, [(row.state, row.step) for row in trouble.rows()]
        for row in trouble.rows():
            entered = since.setdefault((row.id, row.state, row.generation), loop.time())
            limit = TIME_LIMITS.get(JobState(row.state))
            assert limit is None or loop.time() - entered <= limit, f"{row.id} is {row.state} for {limit} s"
    while (
        trouble.plane._owners.by_job or not trouble.cluster.nothing_held
    ):  # a node that was away is cleaned when it is back
        await asyncio.sleep(POLL_SECONDS)
        assert loop.time() - over < PATIENCE_SECONDS, (trouble.plane._owners.by_job, trouble.history)


DRAWN = [
    *(pytest.param("sqlite", seed) for seed in range(2)),
    *(pytest.param("sqlite", seed, marks=pytest.mark.soak) for seed in range(2, 300)),
    pytest.param("postgresql", 0),
    *(pytest.param("postgresql", seed, marks=pytest.mark.soak) for seed in range(1, 20)),
]


@pytest.mark.parametrize(("kind_of_database", "seed"), DRAWN, indirect=["kind_of_database"])
def test_every_job_ends_despite_any_failures(seed, tmp_path, store: Store, submit, monkeypatch):
    monkeypatch.setattr(leases, "now", lambda session: time.time())
    trouble = Trouble(seed, tmp_path, store, submit, monkeypatch)

    async def body():
        await trouble.start_control_plane()
        await trouble.befall()
        await all_end(trouble)

    in_virtual_time(monkeypatch, body)
    assert trouble.training.problems == []
    if not {way for _, way in trouble.history} & TAKEN_OVER_AFTER:
        assert trouble.taken_over() == [], trouble.history
    for row in trouble.rows():
        if row.state == "CANCELLED":
            continue
        assert (row.state, row.step) == ("SUCCEEDED", STEPS), (row.reason, row.message, trouble.history)
        assert sorted({step for _, step in trouble.training.committed[row.id]}) == list(range(1, STEPS + 1))
