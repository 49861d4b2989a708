"""The end of a Slurm job is known from its beginning, and heeded when it is near."""

from datetime import UTC, datetime

import pytest

from manta.workers.node.notice_sources import LEAD_SECONDS, SlurmSource
from manta.workers.node.notices import Notice, SourceUnavailable

END = 1_800_000_000


def at(seconds_before):
    return datetime.fromtimestamp(END - seconds_before, UTC)


@pytest.fixture(autouse=True)
def in_a_slurm_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(END))


@pytest.mark.parametrize(("before", "seconds"), [
    (3600.0, None), (LEAD_SECONDS + 1, None), (LEAD_SECONDS, LEAD_SECONDS), (30.0, 30.0), (-5.0, 0.0)
])  # fmt: skip
def test_slurm_gives_a_notice_only_when_the_end_of_the_allocation_is_near(before, seconds):
    notice = SlurmSource().notice(at(before))
    assert (notice and notice.seconds) == seconds


def test_slurm_notice_period_can_be_set():
    assert SlurmSource(90.0).notice(at(100.0)) is None
    assert SlurmSource(90.0).notice(at(80.0)) == Notice(f"end {END}", 80.0, "the Slurm job reaches its time limit")


@pytest.mark.parametrize("text", ["", "soon", "-1"])
def test_a_machine_outside_of_slurm_is_one_clear_sentence(monkeypatch, text):
    monkeypatch.setenv("SLURM_JOB_END_TIME", text)
    with pytest.raises(SourceUnavailable, match=r"^SLURM_JOB_END_TIME is not set: Ray was not started in a Slurm job"):
        SlurmSource().notice(at(0.0))
