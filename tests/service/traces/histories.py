"""Histories of jobs, in few words."""

from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.store.tables import Generation, Job, Recovery, StateChange
from manta.service.traces.spans import JobHistory
from manta.workers.config import ParallelConfig

JOB = Job(id="job_1", name="small", project="default")


def begun(number, at, trained_from=None, first_step_at=None, ended_at=None):
    """A generation of it."""
    times = {"started_at": at, "trained_from": trained_from, "first_step_at": first_step_at, "ended_at": ended_at}
    return Generation(generation=number, cause=f"cause {number}", resume_source="start", resume_step=0, **times)


def recovered(number, timeline):
    """The recovery from the death of rank 1 that began a generation."""
    source = {"source": "snapshot", "resume_step": 4, "steps_redone": 1, "wait_seconds": 0.0}
    victim = {"kind": "killed", "cause": "rank 1 was killed", "rank": 1, "node": "node-a", "forked": [1], "kept": 3}
    return Recovery(generation=number, **victim, **source, **timeline.to_json())


def history(states, generations, recoveries=(), layout=None):
    """Of the job `job_1`. `states`: "0 QUEUED, 5 STARTING"; `generations`: in order, each (began, trained from, first
    step, ended); `recoveries`: by generation its timeline."""
    entries = [StateChange(time=float(each.split()[0]), state=each.split()[1]) for each in states.split(",")]
    lives = [begun(number, *times) for number, times in enumerate(generations, 1)]
    failures = [recovered(number, timeline) for number, timeline in dict(recoveries).items()]
    return JobHistory(JOB, entries, lives, failures, layout)


def broken_off(**times):
    """The timeline of a recovery that got to no step."""
    return RecoveryTimeline(times.pop("noticed_at"), **times)


LAYOUT = ParallelConfig(tensor=2, data=3)
