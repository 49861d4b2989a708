"""What a database that was restored from a backup knows of its jobs."""

import pytest

from service.store import events, restored


@pytest.mark.parametrize(
    ("since", "unsettled"),
    [
        ((), True),
        (("resize_requested",), True),
        (("generation_started",), False),
        (("adopted",), False),
        (("database_older",), False),
        (("adopted", restored.RESTORED), True),  # once more
    ],
)
def test_job_is_settled_once_something_of_it_was_seen_to_run(store, submit, since, unsettled):
    job = submit()
    assert store.write(lambda s: restored.unsettled(s, job.id)) is False, "it was never restored"
    for kind in (restored.RESTORED, *since):
        store.write(lambda s, kind=kind: events.append(s, job.id, kind, "it happened"))
    assert store.write(lambda s: restored.unsettled(s, job.id)) is unsettled
