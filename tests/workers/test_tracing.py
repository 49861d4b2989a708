"""All ranks record the same steps, in which they do what they always do."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from itertools import pairwise

import pytest
from engine_specs import axes, document
from trace_programs import train_traced

from manta.workers.comm.grid import RankGrid
from manta.workers.protocol.messages import TraceOrder
from manta.workers.protocol.reports import Profiled, TraceBegan, Traced
from manta.workers.schedules.action_lists import training_actions
from manta.workers.schedules.schedule import COMPUTE
from manta.workers.spec.reading import parse_job_spec
from manta.workers.step_traces.analysis import bubble, critical_path
from manta.workers.step_traces.assembly import assembled
from manta.workers.timing.recording import Recording
from manta.workers.training.tracing import _Made

ORDERS = [TraceOrder(1, 0, 2, first_step=3), TraceOrder(2, 0, 1, first_step=0), TraceOrder(3, 0, 9, first_step=6)]
STEPS = {1: (3, 4), 2: (2,), 3: (6,)}
LAYOUTS = [
    pytest.param((2, 2, 1), "1f1b", None, id="2x2x1"),
    pytest.param((2, 2, 2), "1f1b", None, id="2x2x2", marks=pytest.mark.soak),
    pytest.param((1, 2, 1), "zb-h1", None, id="1x2x1-zb-h1"),
    pytest.param((1, 1, 2), "1f1b", "process_groups", id="1x1x2-gloo"),
]


@pytest.mark.parametrize(("layout", "kind", "backend"), LAYOUTS)
def test_ranks_record_the_requested_steps(ranks, corpus, layout, kind, backend):
    job = document(
        data={"paths": [corpus]},
        train={"steps": 6, "micro_batch_size": 2, "validate_every": 4},
        parallel={**axes(layout), "schedule": kind, "recompute": "selective"},
    )
    spec = parse_job_spec(job)
    untraced = ranks.run(spec.layout, train_traced, job, [], backend=backend)
    traced = ranks.run(spec.layout, train_traced, job, ORDERS, backend=backend)
    assert [(curve, state) for curve, _, state in traced] == [(curve, state) for curve, _, state in untraced]
    assert not any(isinstance(each, Traced | TraceBegan) for _, said, _ in untraced for each in said)
    began = [each for _, said, _ in traced for each in said if isinstance(each, TraceBegan)]
    assert began == [TraceBegan(2, 2), TraceBegan(1, 3), TraceBegan(3, 6)], "rank 0 says so"
    for number, steps in STEPS.items():
        recordings = {
            rank: each.recording.unpack()
            for rank, (_, said, _) in enumerate(traced)
            for each in said
            if isinstance(each, Traced) and each.number == number
        }
        assert sorted(recordings) == list(range(spec.layout.world_size))
        assert {tuple(each.step for each in recording.steps) for recording in recordings.values()} == {steps}
        problems = {recording.problem for recording in recordings.values()}
        assert problems == {"the recording was interrupted" if number == 3 else ""}
        look_at(assembled(recordings, RankGrid(spec.layout)), spec, backend)


def test_only_the_requested_rank_is_profiled(ranks, corpus):
    job = document(data={"paths": [corpus]}, train={"steps": 4}, parallel={"data": 2})
    orders = [TraceOrder(1, 0, 2, first_step=2, profiler_ranks=(1,))]
    results = ranks.run(parse_job_spec(job).layout, train_traced, job, orders, True)
    said = [[each for each in reported if isinstance(each, Profiled | Traced)] for _, reported, _ in results]
    assert [[type(each) for each in of_rank] for of_rank in said] == [[Traced], [Profiled, Traced]]
    profile = json.loads(gzip.decompress(base64.b85decode(said[1][0].content)))
    names = Counter(each.get("name") for each in profile["traceEvents"])
    assert names["aten::mm"] + names["aten::addmm"] > 0, "torch's operators"


def test_oversized_profile_is_left_out_with_a_sentence(ranks, corpus):
    job = document(data={"paths": [corpus]}, train={"steps": 3})
    orders = [TraceOrder(1, 0, 1, profiler_ranks=(0,))]
    ((_, reported, _),) = ranks.run(parse_job_spec(job).layout, train_traced, job, orders, True, 1000)
    (profiled,) = [each for each in reported if isinstance(each, Profiled)]
    (traced,) = [each for each in reported if isinstance(each, Traced)]
    assert profiled.content == ""
    assert "and is left out" in traced.recording.problem


def test_unwritable_profile_is_left_out_with_a_sentence():
    class Full:
        def content(self):
            raise OSError(28, "No space left on device")

    made = _Made(1, 3, lambda: Recording((), ()), Full())
    assert made.profiled() == Profiled(1, 3, "")
    assert "No space left on device" in made.traced().recording.problem


def look_at(trace, spec, backend):
    """The trace has all that the schedule says, and what ranks do together is the same on all of them."""
    layout = spec.layout
    actions = training_actions(layout.schedule, layout.pipeline, layout.virtual_stages, spec.micro_batches)
    together = {}
    for rank in trace.ranks:
        at = trace.grid.coordinates(rank.rank)
        expected = [(each.kind, each.micro_batch) for each in actions[at.pipeline] if each.kind in COMPUTE]
        for step, slices in zip(rank.steps, rank.by_step, strict=True):
            assert [(each.kind, each.micro_batch) for each in slices if each.kind in {*COMPUTE}] == expected
            assert {each.stage for each in slices if each.kind in COMPUTE} == {at.pipeline}
            kinds = Counter(each.kind for each in slices)
            assert (kinds["validation"] > 0) <= (step.step in (4, 6))
            for kind in ("loader", "reduction", "agreement", "optimizer", "gather"):
                assert kinds[kind] == 1, kind
            assert (kinds["recompute"] > 0) and all(step.start <= each.start <= each.end <= step.end for each in slices)
        assert all(before.end <= after.start for before, after in pairwise(rank.steps))
        for each in rank.slices:
            if each.kind == "collective":
                group = tuple(trace.grid.group(each.axis, rank.rank))
                together.setdefault((each.axis, group, each.number), []).append((rank.rank, each.operation, each.bytes))
            elif each.kind in ("send", "receive"):
                ends = (rank.rank, each.peer) if each.kind == "send" else (each.peer, rank.rank)
                together.setdefault((ends, each.number), []).append((rank.rank, each.bytes))
            if each.kind in ("collective", "receive"):
                assert (each.wait is None) == (backend is not None)
                assert each.issued <= each.start and (each.wait or 0.0) <= each.end - each.start + 1e-6
    for (*_, members, _number), entries in ((key, value) for key, value in together.items() if len(key) == 3):
        assert sorted(rank for rank, *_ in entries) == list(members)
        assert len({tuple(what) for _, *what in entries}) == 1
    assert all(len(entries) == 2 for key, entries in together.items() if len(key) == 2), "both ends of each message"
    bubbles = [bubble(trace, rank) for rank in trace.ranks]
    assert all(0.0 <= each < 1.0 for each in bubbles) and any(bubbles) == (layout.pipeline > 1)
    assert critical_path(trace)
