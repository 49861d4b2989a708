"""A folder is listed beside the event loop, and one that does not answer holds up nobody."""

import asyncio
import threading
from unittest.mock import Mock

import pytest

from manta.service.job import context
from manta.service.job.context import FolderReader
from manta.workers.checkpoint.catalog import Listing


async def test_checkpoint_folder_that_hangs_is_listed_once_until_it_answers(tmp_path, monkeypatch):
    asked, begun, answers = [], threading.Event(), threading.Event()

    def look(folder, _job):
        asked.append(folder)
        begun.set()
        answers.wait()
        return Listing(folder)

    monkeypatch.setattr(context, "list_checkpoints", look)
    reader = FolderReader()
    for _ in range(3):
        listing = await reader.list(tmp_path, 0.001)
        assert listing.problem == f"the folder {tmp_path} cannot be listed: no answer in 0.001 s"
    assert begun.wait(60) and asked == [tmp_path]
    answers.set()
    assert await reader.list(tmp_path) == Listing(tmp_path)


def test_checkpoint_folder_that_timed_out_is_not_waited_for_again(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(context, "list_checkpoints", lambda folder, _job: answers.wait(60))
    reader = FolderReader()

    async def body():
        await reader.list(tmp_path, 0.001)
        reader._began -= 1000.0
        async with asyncio.timeout(60):
            assert (await reader.list(tmp_path, 1000.0)).problem is not None

    try:
        asyncio.run(body())
    finally:
        answers.set()
        reader._under_way.result(60)  # else it might list with what the next test puts in the place of the function


async def test_checkpoint_listing_begun_before_a_request_does_not_answer_it(tmp_path, monkeypatch):
    """A checkpoint may have been saved since: it would count as gone."""
    answers, seen = [threading.Event(), threading.Event()], iter(range(2))

    def look(folder, _job):
        number = next(seen)
        answers[number].wait(60)
        return Listing(folder, problem=f"look {number}")

    monkeypatch.setattr(context, "list_checkpoints", look)
    reader = FolderReader()
    await reader.list(tmp_path, 0.001)
    later = asyncio.create_task(reader.list(tmp_path, 60.0))
    await asyncio.sleep(0)
    for each in answers:
        each.set()
    assert (await later).problem == "look 1"


def test_checkpoint_listing_error_is_raised_to_its_caller_and_not_cached(tmp_path, monkeypatch):
    reader = FolderReader()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(context, "list_checkpoints", Mock(side_effect=MemoryError("too many")))
        asyncio.run(reader.list(tmp_path))
    assert asyncio.run(reader.list(tmp_path)) == Listing(tmp_path)


def test_checkpoint_folder_is_listed_anew_each_time(tmp_path):
    reader = FolderReader()
    assert asyncio.run(reader.list(tmp_path / "none")) == Listing(tmp_path / "none", exists=False)
    assert asyncio.run(reader.list(tmp_path)) == Listing(tmp_path)
