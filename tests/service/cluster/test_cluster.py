"""Agents and placement groups in a real Ray: they run where they should, and release leaves nothing."""

import asyncio
from pathlib import Path

import psutil
import pytest

from manta.service.cluster.agent_client import AgentFailed
from manta.service.cluster.placement import agent_name, placement_group_name, seats_of
from manta.service.cluster.placement_groups import NotPlaced
from manta.workers.config import ParallelConfig
from manta.workers.paths import Paths
from manta.workers.protocol.messages import LaunchOrder
from tests.service.conftest import SLOTS

LAYOUT = ParallelConfig(tensor=2, data=2)


def go(body, seconds=120.0):
    async def bounded():
        async with asyncio.timeout(seconds):
            return await body()

    return asyncio.run(bounded())


def order(job, generation, rank, **spec):
    return LaunchOrder(job=job, generation=generation, rank=rank, spec=spec)


async def place(cluster, job, generation=1, layout=LAYOUT):
    await cluster.groups.acquire(job, generation, layout, "manta_slot")
    groups = [placement_group_name(job, generation, replica) for replica in range(layout.data)]
    return await cluster.agents.start(job, generation, seats_of(layout, groups), "manta_slot")


async def daemons(running):
    return await running.cluster.daemons.ensure(running.zygote_options, running.zygote_environment)


async def until_free(cluster, units):
    """Wait until Ray's view of its nodes, which lags by some 0.1 s, shows `units` free slots."""
    async with asyncio.timeout(60):
        while (await cluster.nodes.capacity("manta_slot")).free != units:
            await asyncio.sleep(0.05)


def gone(pid):
    try:
        psutil.Process(pid).wait(60)
    except psutil.NoSuchProcess:
        return True
    return not psutil.pid_exists(pid)


async def test_four_agents_launch_trainers_and_release_leaves_nothing(ray_head):
    cluster = ray_head.cluster
    await daemons(ray_head)
    await until_free(cluster, SLOTS)
    assert (await cluster.nodes.capacity("manta_slot")).total == SLOTS
    agents = await place(cluster, "job-a")
    described = await asyncio.gather(*(agent.describe() for agent in agents))
    assert len({entry.pid for entry in described}) == 4
    await until_free(cluster, 0)
    launched = await asyncio.gather(
        *(agent.launch(order("job-a", 1, rank, reports=1, wait=True)) for rank, agent in enumerate(agents))
    )
    reports = await asyncio.gather(*(agent.reports(0, 60.0) for agent in agents))
    assert [report[0].rank for report in reports] == list(range(4))
    names = [agent_name("job-a", 1, rank) for rank in range(5)]
    assert sorted(await cluster.agents.names_on(described[0].node)) == names[:4]
    assert await cluster.agents.names_on("another") == []
    known = await cluster.agents.find(names)
    assert known[4] is None
    assert [entry.pid for entry in await asyncio.gather(*(agent.describe() for agent in known[:4]))] == [
        entry.pid for entry in described
    ]
    await cluster.release("job-a")
    assert await cluster.agents.find(names) == [None] * 5
    assert await cluster.groups.states() == {}
    assert all(gone(entry.pid) for entry in [*described, *launched])
    await until_free(cluster, SLOTS)


async def test_stale_generation_arrives_as_its_own_error(ray_head):
    await daemons(ray_head)
    (agent,) = await place(ray_head.cluster, "job-b", layout=ParallelConfig())
    await agent.launch(order("job-b", 2, 0, wait=True))
    with pytest.raises(Exception, match="at generation 2") as caught:
        await agent.launch(order("job-b", 1, 0))
    assert isinstance(caught.value, AgentFailed)
    assert "StaleGeneration" in caught.value.kind
    await ray_head.cluster.release("job-b")


async def test_placement_groups_that_do_not_fit_are_released_again(ray_head):
    cluster = ray_head.cluster
    with pytest.raises(NotPlaced, match="job-c did not get 24 slots"):
        await cluster.groups.acquire("job-c", 1, ParallelConfig(tensor=8, data=3), "manta_slot", timeout=1.0)
    assert await cluster.groups.states() == {}
    await until_free(cluster, SLOTS)


class Lost:
    """An agent that a database knew which is gone."""


async def test_cluster_lists_jobs_with_resources_and_releases_them_separately(ray_head):
    cluster = ray_head.cluster
    (alive,) = await place(cluster, "alive", layout=ParallelConfig())
    await place(cluster, "orphan", layout=ParallelConfig(data=2))
    await cluster.groups.acquire("empty", 3, ParallelConfig(), "manta_slot")
    await alive.describe()
    lost = ray_head.ray.remote(Lost).options(name=agent_name("lost", 1, 0), namespace="lost", num_cpus=0).remote()
    await asyncio.to_thread(ray_head.ray.get, lost.__ray_ready__.remote())
    assert await cluster.jobs() == ["alive", "empty", "orphan"]
    assert await cluster.agents.jobs_of_other_installations() == ["lost"]
    await cluster.release("empty")
    await cluster.release("orphan")
    assert (await alive.describe()).generation == 0
    await until_free(cluster, SLOTS - 1)
    await cluster.release("alive")


async def test_node_daemon_hosts_stores_and_lists_leftovers_of_jobs(ray_head):
    (daemon,) = (await daemons(ray_head)).values()
    first = await daemon.start_store("job-d", 1)
    second = await daemon.start_store("job-d", 2)
    assert second == first, "generations have keys of their own in it"
    assert await accepts(second)
    with pytest.raises(Exception, match="store of generation 2"):
        await daemon.start_store("job-d", 1)
    folder = Paths.of(ray_head.home).snapshot_folder("job-d")
    folder.mkdir(parents=True)
    (folder / "rank-00000.snapshot").write_bytes(b"x")
    assert await daemon.jobs() == ["job-d"]
    await daemon.end_job("job-d")
    assert await daemon.jobs() == []
    assert not folder.exists()
    assert not await accepts(second)


async def accepts(store):
    try:
        _, writer = await asyncio.open_connection(store.host, store.port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_node_daemon_is_found_again_and_replaced_when_dead(ray_head):
    (first,) = (await daemons(ray_head)).values()
    (same,) = (await daemons(ray_head)).values()
    described = await first.describe()
    assert (await same.describe()).pid == described.pid
    assert described.shared_memory_bytes > 0
    psutil.Process(described.pid).kill()
    assert gone(described.zygote_pid)
    while not (found := list((await daemons(ray_head)).values())):  # Ray may not have noticed yet
        await asyncio.sleep(0.05)
    (second,) = found
    assert (await second.describe()).pid != described.pid


async def test_dead_zygote_is_started_again(ray_head):
    (daemon,) = (await daemons(ray_head)).values()
    zygote = (await daemon.describe()).zygote_pid
    psutil.Process(zygote).kill()
    (agent,) = await place(ray_head.cluster, "job-e", layout=ParallelConfig())
    await agent.launch(order("job-e", 1, 0, reports=1))
    assert (await agent.reports(0, 60.0))[0].kind == "event"
    assert (await daemon.describe()).zygote_pid != zygote
    await ray_head.cluster.release("job-e")


async def test_agents_import_neither_torch_nor_the_database(ray_head):
    (agent,) = await place(ray_head.cluster, "job-f", layout=ParallelConfig())
    pid = (await agent.describe()).pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "sqlite" not in maps
    await ray_head.cluster.release("job-f")


async def test_placement_uses_the_only_node_although_it_keeps_failing(ray_head):
    cluster = ray_head.cluster
    await until_free(cluster, SLOTS)
    (node,) = (await cluster.nodes.capacity("manta_slot")).nodes
    await cluster.groups.acquire("job-avoids", 1, LAYOUT, "manta_slot", avoid={node})
    await until_free(cluster, 0)
    await cluster.release("job-avoids")
    await until_free(cluster, SLOTS)
