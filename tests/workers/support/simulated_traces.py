"""Traces of steps that were never run: recordings as a simulated schedule's ranks would make them."""

from __future__ import annotations

from benchmarks.support.timeline import PassTimes, Timeline
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.schedules.stages import neighbours, virtual_stage
from manta.workers.step_traces.assembly import StepTrace, assembled
from manta.workers.timing.recording import Recording, Slice, TracedStep

STEP = 7
CLOCK = 5000.0
"""What a machine's clock says when the step begins."""


def timeline_of(kind: str, stages: int, virtual_stages: int, micro_batches: int, times: PassTimes) -> Timeline:
    """The passes of one step."""
    return Timeline.of(times.pipeline(kind, stages, virtual_stages), micro_batches)


def recordings_of(kind: str, virtual_stages: int, timeline: Timeline) -> dict[int, Recording]:
    """What the ranks of one pipeline would record. Each pass begins when its rank is free, waits for its message, and
    computes; all meet after the last one."""
    stages, end = len(timeline.passes), timeline.makespan
    sent: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[bool, int, int, int], tuple[int, int, float]] = {}
    passes = [(start, end, rank, action) for rank, own in enumerate(timeline.passes) for action, start, end in own]
    for _, over, rank, action in sorted(passes, key=lambda each: each[1]):
        before, behind = neighbours(kind, stages, virtual_stages, rank, action.chunk)
        to = {"forward": behind, "backward": before, "backward_input": before}.get(action.kind)
        if to is not None and to[0] != rank:
            sent[rank, to[0]] = sent.get((rank, to[0]), 0) + 1
            key = action.kind == "forward", to[0], to[1], action.micro_batch
            numbers[key] = rank, sent[rank, to[0]], over
    return {rank: _recording(rank, kind, virtual_stages, timeline, numbers, end) for rank in range(stages)}


def _recording(rank, kind, virtual_stages, timeline, numbers, end) -> Recording:
    stages, slices, free = len(timeline.passes), [], 0.0
    for action, start, over in timeline.passes[rank]:
        stage = virtual_stage(kind, stages, virtual_stages, rank, action.chunk)
        about = {"step": STEP, "stage": stage, "micro_batch": action.micro_batch}
        slices.append(Slice(action.kind, free, over, **about))
        message = numbers.get((action.kind == "forward", rank, action.chunk, action.micro_batch))
        if action.kind != "backward_weight" and message is not None:
            peer, number, _ = message
            more = {"axis": "pipeline", "peer": peer, "number": number, "bytes": 8, "wait": start - free}
            slices.append(Slice("receive", free, start, issued=free, **more, **about))
        before, behind = neighbours(kind, stages, virtual_stages, rank, action.chunk)
        to = {"forward": behind, "backward": before, "backward_input": before}.get(action.kind)
        if to is not None and to[0] != rank:
            _, number, _ = numbers[action.kind == "forward", to[0], to[1], action.micro_batch]
            more = {"axis": "pipeline", "peer": to[0], "number": number, "bytes": 8}
            slices.append(Slice("send", over, over, issued=over, **more, **about))
        free = over
    world = {"axis": "world", "number": 1, "operation": "all_reduce", "bytes": 8}
    slices.append(Slice("collective", free, end, STEP, wait=end - free, issued=free, **world))
    moved = [
        each._replace(start=CLOCK + each.start, end=CLOCK + each.end, issued=each.issued and CLOCK + each.issued)
        for each in slices
    ]
    moved = [each if each.issued != 0.0 else each._replace(issued=CLOCK) for each in moved]
    moved.sort(key=lambda each: (each.start, -each.end))
    return Recording((TracedStep(STEP, CLOCK, CLOCK + end),), tuple(moved), "here")


def grid_of(kind: str, stages: int, virtual_stages: int) -> RankGrid:
    """Of one pipeline."""
    return RankGrid(ParallelConfig(pipeline=stages, schedule=kind, virtual_stages=virtual_stages))


def trace_of(kind: str, stages: int, virtual_stages: int, timeline: Timeline) -> StepTrace:
    """The trace of the pipeline's step."""
    return assembled(recordings_of(kind, virtual_stages, timeline), grid_of(kind, stages, virtual_stages))
