"""Steps of real jobs, traced through the service: all ranks the same ones, and with a sentence where something is
missing."""

import gzip
import json

import pytest
from perfetto_reader import read_trace
from typer.testing import CliRunner

from manta.api.cli.main import command_line
from manta.api.client import ApiError, calls
from manta.service.step_traces.budget import ONLY_SOME_HAVE, PARTS
from tests.e2e.manta import PAIR, STEPS


def until_over(manta, job, trace_id):
    """The trace, once nothing more comes to it."""

    def over():
        (trace,) = [each for each in manta.client.traces(job).items if each.id == trace_id]
        return trace if trace.state not in ("requested", "recording") else None

    return manta.until(f"the end of {trace_id}", over)


def test_steps_of_eight_ranks_are_recorded(manta, tmp_path):
    job = manta.submit(manta.spec(steps=10_000, layout=(2, 2, 2), train={"micro_batch_size": 1}))
    manta.leave_room(job)
    manta.until_step(job, 2)
    file = tmp_path / "trace.pftrace"
    options = ["--steps", "2", "--output", str(file), "--profile-rank", "3"]
    command = ["trace", job, *options, "--json", "--url", manta.url]
    done = CliRunner().invoke(command_line(), command, env={"MANTA_API_KEY": manta.key})
    assert done.exit_code == 0, done.output
    made = json.loads(done.output)
    assert (made["id"], made["job_id"], made["state"], made["message"]) == ("trace_1", job, "complete", None)
    assert (made["schedule"], made["parallel"]["world_size"], made["steps"]) == ("1f1b", 8, 2)
    assert [rank["rank"] for rank in made["ranks"]] == list(range(8))
    first = made["first_step"]
    for rank in made["ranks"]:
        assert [step["step"] for step in rank["steps"]] == [first, first + 1]
        kinds = {each["kind"] for each in rank["slices"]}
        assert kinds >= {"loader", "forward", "backward", "send", "receive", "collective", "reduction", "optimizer"}
        assert rank["node"]
    assert made["clock"] == {"error_seconds": 0.0, "device": False}
    assert 0 < made["bubble"]["mean"] < 1 and len(made["bubble"]["ranks"]) == 8
    assert all(made["ranks"][rank]["slices"][index] for rank, index in made["critical_path"])
    budget = made["budget"]
    assert [part["name"] for part in budget["parts"]] == [part for part in PARTS if part not in ONLY_SOME_HAVE]
    assert sum(part["seconds"] for part in budget["parts"]) == pytest.approx(budget["step_seconds"])
    steps = [step["end"] - step["start"] for rank in made["ranks"] for step in rank["steps"]]
    assert budget["step_seconds"] == pytest.approx(sum(steps) / len(steps), rel=1e-3)
    assert made["planned"]["step_seconds"] > 0 and len(made["planned"]["ranks"]) == 2
    tracks = read_trace(file.read_bytes())
    for rank, track in zip(made["ranks"], [track for track in tracks if track.parent], strict=True):
        assert track.name.startswith(f"rank {rank['rank']} ")
        assert len(track.slices) == len(rank["slices"]) + len(rank["steps"])
    assert made["profiles"] == [3]
    profile = json.loads(gzip.decompress((tmp_path / "trace.rank-3.json.gz").read_bytes()))
    assert any(each.get("name") == "aten::mm" for each in profile["traceEvents"])
    assert manta.client.budget(job).measured_from == "trace_1"
    assert manta.client.budget(job, "phases").measured_from == "phases"
    assert manta.client.traces(job).items[0].budget.measured_from == "trace_1"
    manta.cancel(job)
    assert manta.client.trace(job, "trace_1").state == "complete"
    assert manta.client.delete(job).rows["step_trace_parts"] == 8


def test_trace_recordings_interrupted_by_fault_pause_or_end_say_so(manta, pair_undisturbed):
    """Three traces of one job: a rank dies in the first, which a second one waits for; the job is paused in the second;
    the third would go on beyond the last step."""
    job = manta.submit_held(manta.spec(layout=PAIR, checkpoint={"snapshot_every_steps": 1}), 0, 5)
    first, second = (manta.client.request_trace(job, steps=20, step=step) for step in (0, 14))
    assert [first.state, second.state] == ["requested", "requested"]
    manta.until("the first one being recorded", lambda: manta.client.traces(job).items[1].state == "recording")
    assert manta.client.traces(job).items[0].state == "requested", "one after the other"
    manta.inject(job, "kill", 1, phase="backward")
    over = until_over(manta, job, first.id)
    assert (over.state, over.generation) == ("partial", 1)
    assert "rank 1 was killed (SIGKILL" in over.message and "there is no recording of rank 1" in over.message
    assert [rank.rank for rank in manta.client.trace(job, first.id).ranks] == [0]
    manta.until("the second one being recorded", lambda: manta.client.traces(job).items[0].state == "recording")
    manta.client.pause(job)
    over = until_over(manta, job, second.id)
    assert (over.generation, over.first_step >= 14) == (2, True)
    assert over.state in ("partial", "failed") and "the job is PAUSED, at step" in over.message
    third = manta.client.request_trace(job, steps=20, step=STEPS - 2)
    manta.resume_held(job, 0, STEPS - 12)  # it is told of the third one before that begins
    manta.until_state(job, "SUCCEEDED")
    over = until_over(manta, job, third.id)
    assert (over.state, over.first_step) == ("partial", STEPS - 2)
    assert over.message == f"the recording was interrupted: the job is SUCCEEDED, at step {STEPS}"
    assert [step.step for step in manta.client.trace(job, third.id).ranks[1].steps] == [STEPS - 2, STEPS - 1, STEPS]
    assert manta.curve(job) == pair_undisturbed
    with pytest.raises(ApiError, match="SUCCEEDED: only a job that still trains"):
        manta.client.request_trace(job)
    with pytest.raises(ApiError, match="no such trace"):
        manta.client.send(calls.trace(job, "trace_9"))
