"""All ranks end after the same step when any of them is asked to, with their state in memory and on disk, and what goes
on from either is the job that nobody interrupted."""

import shutil

import pytest
from early_end_programs import train
from engine_specs import axes, document

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import Resume

STEPS = 7


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("to be or not to be, that is the question. " * 60, encoding="utf-8")

    def make(layout):
        checkpoint = {"every_steps": 0, "snapshot_every_steps": 3}
        steps = {"steps": STEPS, "micro_batch_size": 2, "optimizer": {"warmup_steps": 2}}
        return document(data={"paths": [str(path)]}, train=steps, parallel=axes(layout), checkpoint=checkpoint)

    return make


@pytest.mark.parametrize(
    ("layout", "backend"),
    [((1, 2, 2), "links"), pytest.param((2, 1, 1), "process_groups", marks=pytest.mark.soak)],
    ids=["pipeline_and_data", "process_groups"],
)
def test_request_to_one_rank_ends_the_whole_job_early_without_changing_its_curve(
    ranks, spec, tmp_path, layout, backend
):
    job, world = spec(layout), ParallelConfig(**axes(layout))

    def run(*arguments):
        return ranks.run(world, train, job, str(tmp_path), *arguments, backend=backend)

    whole = ranks.run(world, train, job, str(tmp_path / "undisturbed"), backend=backend)[0][-1]
    last = world.world_size - 1
    ended = run(Resume(), (last, 3))
    assert {(step, early) for step, early, _, _ in ended} == {(4, True)}
    assert all(kept[-1] == 4 for _, _, kept, _ in ended), "though no snapshot was due"
    ((_, manifest),) = complete_checkpoints(tmp_path / "durable")
    assert manifest.step == 4
    from_memory = run(Resume("snapshot", 4), (0, 5))
    assert {(step, early) for step, early, _, _ in from_memory} == {(6, True)}
    shutil.rmtree(tmp_path / "shared")
    (_, *_), (newest, manifest) = complete_checkpoints(tmp_path / "durable")
    assert manifest.step == 6
    from_disk = run(Resume("checkpoint", 6, str(newest)))
    assert {(step, early) for step, early, _, _ in from_disk} == {(STEPS, False)}
    curve = {row[0]: row for part in (ended, from_memory, from_disk) for row in part[0][-1]}
    assert [curve[step] for step in sorted(curve)] == whole


def test_request_to_end_early_in_the_last_step_has_no_effect(ranks, spec, tmp_path):
    (trained,) = ranks.run(ParallelConfig(), train, spec((1, 1, 1)), str(tmp_path), Resume(), (0, STEPS - 1))
    assert trained[:2] == (STEPS, False)
    assert complete_checkpoints(tmp_path / "durable") == []
