"""A fault that could never strike is refused, with the reason; any other is armed at the agent of its rank, whichever
control plane owns the job."""

import asyncio
from types import SimpleNamespace

import pytest
from sqlalchemy import select

from manta.service.cluster.agent_client import AgentTimeout
from manta.service.cluster.placement import agent_name
from manta.service.control.faults import FaultInjector, FaultNotConfirmed, FaultNotPossible, refuse_impossible
from manta.service.states import JobState
from manta.service.store import generations, jobs, ranks
from manta.service.store.tables import Event
from manta.workers.protocol.messages import Fault


class Agent:
    """Takes faults, or does not answer."""

    def __init__(self):
        self.faults, self.silent = [], False

    async def tell(self, request):
        if self.silent:
            raise AgentTimeout("no answer")
        self.faults.append(request.fault)
        return True


@pytest.fixture
def job(store, submit):
    """A STARTING job of two replicas, none of whose generations has begun."""
    job_id = submit(parallel={"data": 2}).id
    store.write(lambda s: jobs.transition(s, job_id, JobState.STARTING))
    return job_id


@pytest.fixture
def agents(job):
    """By name, those that the job's places were got for."""
    return {agent_name(job, 1, rank): Agent() for rank in range(2)}


@pytest.fixture
def owned():
    """The agents of the job, if this control plane owns it: it does not."""
    return []


@pytest.fixture
def inject(store, job, agents, owned):
    """Inject a fault into the job."""

    async def find(names):
        return [agents.get(name) for name in names]

    injector = FaultInjector(store, SimpleNamespace(agents=SimpleNamespace(find=find)), lambda job_id: owned)
    return lambda fault: asyncio.run(injector.inject(job, fault))


def begin(store, job, named_for):
    """The next generation begins, with agents whose places were got for generation `named_for`."""

    def write(session):
        number = generations.begin(session, job, "submitted", False)
        row = {"tensor": 0, "pipeline": 0, "generation": number, "state": ranks.STARTING}
        named = [agent_name(job, named_for, rank) for rank in range(2)]
        rows = [{**row, "rank": rank, "data": rank, "actor": name} for rank, name in enumerate(named)]
        ranks.replace(session, job, rows)

    store.write(write)


def of_fault(store, job):
    """Rank and step of all events of faults."""
    with store.read() as session:
        rows = session.scalars(select(Event).where(Event.job_id == job).order_by(Event.id))
        return [(row.rank, row.step) for row in rows if row.type == "fault_injected"]


def asked(kind="kill", rank=0, at_step=0, phase="data"):
    return Fault("fault_1", kind, rank, at_step, phase)


@pytest.mark.parametrize(
    ("fault", "ranks", "step", "said"),
    [
        (asked(), 0, 0, "no ranks yet"),
        (asked(rank=4), 4, 0, "no rank 4; its ranks are 0 to 3"),
        (asked(rank=1), 1, 0, "the job has no rank 1; its only rank is 0"),
        (asked(at_step=11), 4, 0, "step 11 will never start: the job has committed 0 of 10 steps"),
        (asked(at_step=10), 4, 10, "step 10 will never start: the job has committed 10 of 10 steps"),
        (asked("store"), 1, 0, "one rank has no rendezvous store"),
    ],
)
def test_fault_that_can_never_strike_is_refused(fault, ranks, step, said):
    with pytest.raises(FaultNotPossible, match=said):
        refuse_impossible(fault, ranks, step, 10)


@pytest.mark.parametrize(
    ("fault", "ranks", "step"),
    [
        (asked(rank=3), 4, 0),
        (asked(at_step=10), 4, 9),
        (asked(at_step=3), 4, 9),  # as soon as possible after it
        (asked(at_step=11, phase="start"), 4, 10),  # where the number of a step means nothing
        (asked(at_step=11, phase="recovery"), 4, 0),
        (asked("store"), 2, 0),
        (asked(), 1, 0),
    ],
)
def test_fault_that_can_strike_is_accepted(fault, ranks, step):
    refuse_impossible(fault, ranks, step, 10)


def test_fault_is_armed_at_the_agent_of_its_rank_before_and_after_the_job_begins(store, job, agents, inject):
    inject(asked(rank=1, at_step=3))
    begin(store, job, named_for=1)
    inject(asked(rank=1, phase="recovery"))
    begin(store, job, named_for=1)  # a recovery in place keeps the agents
    inject(asked())
    assert [len(agent.faults) for agent in agents.values()] == [1, 2]
    assert of_fault(store, job) == [(1, 3), (1, None), (0, 0)]


def test_agents_of_a_job_that_is_owned_need_not_be_found(store, job, agents, owned, inject):
    agents.clear()
    owned += [None, Agent()]
    inject(asked(rank=1))
    with pytest.raises(FaultNotPossible, match="rank 0 is being replaced; try again"):
        inject(asked())
    assert ([len(agent.faults) for agent in owned if agent], of_fault(store, job)) == ([1], [(1, 0)])


def test_fault_of_a_job_that_is_placed_again_is_armed_at_its_new_agents(store, job, agents, inject):
    begin(store, job, named_for=1)
    agents.clear()
    agents[agent_name(job, 2, 0)] = new = Agent()
    inject(asked())
    assert len(new.faults) == 1


def test_fault_of_a_rank_without_an_agent_is_refused_and_not_recorded(store, job, agents, inject):
    begin(store, job, named_for=1)
    del agents[agent_name(job, 1, 1)]
    with pytest.raises(FaultNotPossible, match="rank 1 is being replaced; try again"):
        inject(asked(rank=1))
    agents.clear()
    with pytest.raises(FaultNotPossible, match="the job has no ranks yet; wait until it is RUNNING"):
        inject(asked(rank=1))
    assert of_fault(store, job) == []


def test_fault_whose_agent_answers_late_is_sent_but_not_confirmed(agents, inject):
    for agent in agents.values():
        agent.silent = True
    with pytest.raises(FaultNotConfirmed, match="sent, but the agent of rank 1 has not confirmed it yet"):
        inject(asked(rank=1))


def test_fault_for_a_finished_job_is_refused_although_agents_remain(store, job, inject):
    begin(store, job, named_for=1)
    store.write(lambda s: jobs.request_cancel(s, job))
    store.write(lambda s: jobs.transition(s, job, JobState.CANCELLED))
    with pytest.raises(FaultNotPossible, match="the job is CANCELLED, and faults need a running job"):
        inject(asked())
