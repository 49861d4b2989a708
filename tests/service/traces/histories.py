"""Histories of jobs, in few words."""

from manta.service.ledger import StateEntry
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.traces.spans import JobHistory, PastGeneration, PastRecovery
from manta.workers.config import ParallelConfig


def history(states, generations, recoveries=(), layout=None):
    """Of the job `job_1`. `states`: "0 QUEUED, 5 STARTING"; `generations`: in order, each (began, trained from, first
    step, ended); `recoveries`: by generation its timeline."""
    entries = [StateEntry(float(each.split()[0]), each.split()[1]) for each in states.split(",")]
    lives = [
        PastGeneration(number, f"cause {number}", began, trained_from=trained, first_step_at=first, ended_at=ended)
        for number, (began, trained, first, ended) in enumerate(generations, 1)
    ]
    failures = [
        PastRecovery(number, "killed", "rank 1 was killed", 1, timeline, "node-a", (1,), 3, "snapshot", 4, 1)
        for number, timeline in dict(recoveries).items()
    ]
    return JobHistory("job_1", "small", "default", entries, lives, failures, layout)


def broken_off(**times):
    """The timeline of a recovery that got to no step."""
    return RecoveryTimeline(times.pop("noticed_at"), **times)


LAYOUT = ParallelConfig(tensor=2, data=3)
