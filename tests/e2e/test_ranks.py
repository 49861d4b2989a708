"""A slow rank is seen as such while its job goes on; its job's checkpoints are exported and deleted meanwhile."""

from pathlib import Path

from manta.api.client import calls
from manta.api.requests import ExportRequest

OLDER = 5


def test_slow_rank_is_seen_and_checkpoints_are_exported_and_deleted(manta):
    spec = manta.spec(steps=10_000, layout=(1, 1, 2), checkpoint={"every_steps": OLDER, "keep": 100})
    job = manta.submit_held({**spec, "labels": {"test": "ranks"}}, rank=1, seconds=0.2)

    def slow_one():
        first, second = manta.client.ranks(job).items
        return second.own_seconds and second.own_seconds > 2 * first.own_seconds and (first, second)

    first, second = manta.until("rank 1 being slow", slow_one)
    assert first.wait_seconds > second.wait_seconds and first.memory_bytes > 2**20
    history = manta.client.send(calls.rank_history(job))
    assert history.steps == sorted(history.steps) and {len(own) for own in history.own_seconds} == {2}

    def waiting():
        seen = manta.client.send(calls.waits(job))
        return [rank.waits_for for rank in seen.ranks] == [[1], []] and seen

    waits = manta.until("rank 0 waiting", waiting)
    assert waits.culprits == []
    assert waits.sentence.startswith("1 of 2 ranks waits, in the end for rank 1, which is in ")
    stack = manta.client.send(calls.rank_stack(job, 1))
    assert stack.pid == manta.pids(job)[1] and "workers/trainer.py" in stack.text
    assert manta.client.logs(job, rank=1, tail=200, search="workers/trainer.py").items, "it is in its log too"
    assert [each.id for each in manta.client.jobs(labels=["test=ranks"], sort="step").items] == [job]

    def older():
        saved = [each for each in manta.client.checkpoints(job).items if each.state == "complete"]
        return next((each for each in saved if each.step == OLDER), None)

    checkpoint = manta.until("an older checkpoint", older)
    begun = manta.client.send(calls.export_checkpoint(job, checkpoint.id, ExportRequest(to=f"weights-of-{job}")))
    ended = manta.until(
        "the export", lambda: (seen := manta.client.send(calls.export(job, begun.id))).state != "running" and seen
    )
    assert (ended.state, ended.message, ended.done_bytes) == ("done", None, ended.total_bytes)
    assert (Path(ended.to) / "model.safetensors").stat().st_size > ended.total_bytes
    assert manta.client.send(calls.delete_checkpoint(job, checkpoint.id)).state == "deleted"
    assert not Path(checkpoint.path).exists()
    manta.cancel(job)
