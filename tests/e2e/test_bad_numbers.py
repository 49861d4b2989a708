"""A text with a passage unlike the rest: the step that reads it spikes, and its samples are skipped."""

import random

import pytest

from manta.service.states import is_final

STEPS = 80
SPIKE = {"policy": "roll_back", "window": 10, "loss_deviations": 6.0, "grad_norm_deviations": None}


@pytest.fixture(scope="module")
def odd_corpus(tmp_path_factory):
    """One line over and over, and in its middle a passage of noise."""
    line, noise = "the same few words again and again. ", random.Random(5)
    passage = "".join(chr(noise.randrange(0x21, 0x7F)) for _ in range(60))
    path = tmp_path_factory.mktemp("corpus") / "odd.txt"
    path.write_text(line * 400 + passage + line * 400)
    return path


def rolling_back(manta, corpus, layout=(1, 1, 2), **recovery):
    """A job that meets the passage once it knows the line."""
    return manta.spec(
        STEPS,
        layout,
        data={"paths": [str(corpus)]},
        train={"optimizer": {"learning_rate": 1e-2, "warmup_steps": 5}, "seed": 3},
        recovery={"spike": SPIKE, "roll_back_steps": 8, **recovery},
    )


@pytest.fixture(scope="module")
def rolled_back(manta, odd_corpus):
    """The job when nothing else happens to it, and what was seen of its committed step meanwhile."""
    seen = []

    def over():
        now = manta.client.job(job)
        seen.append(now.step)
        return is_final(now.state)

    with manta.starting(rolling_back(manta, odd_corpus)) as (job, _):
        over()  # it may be over at the next look
    manta.until("its end", over)
    assert manta.client.job(job).state == "SUCCEEDED", manta.story(job)
    return job, seen


def skipped(manta, job):
    """What the job skipped, in order."""
    return [(event.step, event.data["samples"]) for event in manta.events(job, "rolled_back")]


def test_spike_samples_are_skipped_after_a_roll_back(manta, rolled_back):
    job, _ = rolled_back
    events = manta.events(job, "rolled_back")
    assert events, manta.story(job)
    first = events[0]
    assert first.data["back_to"] < first.step
    assert [event.step for event in manta.events(job, "spike")] == [event.step for event in events]
    assert [step for step, _, _ in manta.curve(job)] == list(range(1, STEPS + 1))
    assert manta.client.job(job).restarts == 0


def test_committed_step_never_goes_back(rolled_back):
    _, seen = rolled_back
    assert len(set(seen)) > 1 and seen == sorted(seen)


@pytest.mark.soak  # its parts: tests/workers/test_roll_back.py, and the tests before and after this one
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_right_after_a_roll_back_the_job_keeps_its_order_of_samples(
    manta, odd_corpus, rolled_back, kill, victim
):
    clean, _ = rolled_back
    job = manta.submit_held(rolling_back(manta, odd_corpus), victim, manta.events(clean, "rolled_back")[0].step - 1)
    manta.until("the roll back", lambda: skipped(manta, job))
    kill(manta.pids(job)[victim])
    ended = manta.until_state(job, "SUCCEEDED")
    assert ended.restarts == 1, manta.story(job)
    assert manta.curve(job) == manta.curve(clean)
    assert skipped(manta, job) == skipped(manta, clean)
