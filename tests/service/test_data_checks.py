"""One look at a time at the data of a job, which is looked at anew whenever that is asked again."""

import asyncio

import pytest

from manta.service.control import data_checks
from manta.service.control.data_checks import DataChecks, DataTimeout

AWAY = {"source": "text", "paths": ["/away"]}


async def test_data_check_result_is_not_cached(make_spec):
    answers = iter([None, "it is gone", None])

    async def check(_spec):
        return next(answers)

    looks = DataChecks(check)
    assert [await looks.problem("job", make_spec()) for _ in range(3)] == [None, "it is gone", None]


async def test_data_checks_of_jobs_that_left_the_queue_are_cancelled(make_spec, monkeypatch):
    monkeypatch.setattr(data_checks, "POLL_SECONDS", 0.0)
    ended = []

    async def check(spec):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(spec.name)

    looks = DataChecks(check)
    for name in ("kept", "gone"):
        with pytest.raises(DataTimeout):
            await looks.problem(name, make_spec(name=name, data={"source": "text", "paths": [f"/{name}"]}))
        await asyncio.sleep(0)
    looks.keep_only(["kept"])
    await asyncio.sleep(0)
    assert list(ended) == ["gone"]


def test_second_check_on_a_silent_file_system_loses_its_turn(make_spec, monkeypatch):
    monkeypatch.setattr(data_checks, "POLL_SECONDS", 0.0)

    async def check(_spec):
        await asyncio.Event().wait()

    async def keeps_turn(looks, job, **data):
        with pytest.raises(DataTimeout) as silent:
            await looks.problem(job, make_spec(data=AWAY | data))
        return silent.value.keeps_turn

    async def body():
        looks = DataChecks(check)
        turns = [await keeps_turn(looks, "first")]
        looks._under_way["first"].began -= data_checks.TURN_SECONDS
        return [*turns, await keeps_turn(looks, "first"), await keeps_turn(looks, "second", paths=["/beside"])]

    assert asyncio.run(body()) == [True, False, False]
