"""A fresh job database for every test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.states import JobState
from service.store import Job, Store, jobs
from workers.config import parse_job_spec

DOCUMENT = {
    "name": "small",
    "model": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 8},
    "data": {"source": "python-stdlib"},
    "train": {"steps": 10, "global_batch_size": 4},
}


@pytest.fixture
def make_spec():
    """Makes the small spec, with some of its sections replaced."""
    return lambda **changes: parse_job_spec({**DOCUMENT, **changes})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/manta.db")
    store.migrate()
    yield store
    store.close()


@pytest.fixture
def submit(store: Store, make_spec) -> Callable[..., Job]:
    """Stores a job made of the small spec, with some of its sections replaced."""
    return lambda **changes: store.write(lambda session: jobs.create(session, make_spec(**changes)))[0]


@pytest.fixture
def started(store: Store, submit) -> Job:
    """A STARTING job."""
    job_id = submit().id
    return store.write(lambda session: jobs.transition(session, job_id, JobState.STARTING))
