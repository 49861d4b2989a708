"""Where a plan's time goes adds up to its step; what one change would do is what a plan with it says."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml

from manta.service.planner.budget import sentences
from manta.service.planner.drift import GROUPS
from manta.service.planner.explain import _lists, explain, to_json, what_ifs
from manta.service.planner.hardware import Cluster, Gpu, cpu_machine, machine_of, measured
from manta.service.planner.long_run import NeverFinishes
from manta.service.planner.memory import fits, usable_bytes
from manta.service.planner.pictures import picture
from manta.service.planner.request import together
from manta.service.planner.search import evaluate, plan_of
from manta.service.planner.software import engine_on
from manta.service.planner.step_time import StepModel
from manta.workers.config import ElasticConfig, JobSpec
from tests.service.support import planned

GPU = Gpu(2.4e14, 1.5e13, 1.8e14, 1.6e12, 1.2e12, 3e-6, 1e-5, 2e10)
CLUSTERS = {
    "a100": Cluster(machine_of("a100"), 4, 8),
    "measured": Cluster(measured(machine_of("a100"), GPU), 4, 8),
    "cpu": Cluster(cpu_machine(8, 2, 2**34), 4, 8),
}
LAYOUTS = [
    {},
    {"tensor": 4, "pipeline": 2, "data": 2},
    {"pipeline": 4, "virtual_stages": 2, "schedule": "interleaved", "recompute": "full"},
    {"tensor": 2, "pipeline": 4, "schedule": "zb-h1", "data": 2},
    {"pipeline": 2, "virtual_stages": 2, "schedule": "zb-v", "zero": 0, "data": 4},
]


def job(parallel, **train) -> JobSpec:
    return JobSpec.model_validate({
        "model": {"layers": 14, "hidden_size": 1024, "heads": 16, "sequence_length": 512, "vocabulary_size": 32000},
        "data": {"source": "megatron", "paths": ["corpus.bin"]},
        "train": {"steps": 10, "global_batch_size": 64, "micro_batch_size": 2, "precision": "bf16", **train},
        "parallel": parallel,
    })  # fmt: skip


def explained(parallel, cluster="a100", **train):
    spec, where = job(parallel, **train), CLUSTERS[cluster]
    plan = plan_of(spec, where, engine_on(where.machine))
    return plan, explain(plan, where)


@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_explained_shares_sum_to_the_step_and_none_is_negative(parallel, cluster):
    plan, explanation = explained(parallel, cluster)
    assert sum(each.seconds for each in explanation.shares) == pytest.approx(plan.time.seconds, rel=1e-9)
    assert all(each.seconds > -1e-9 * plan.time.seconds for each in explanation.shares), explanation.shares
    seconds = {each.name: each.seconds for each in explanation.shares}
    assert (seconds["recomputation"] > 0) == (plan.spec.layout.recompute != "none")
    assert (seconds["tensor"] > 0) == (plan.spec.layout.tensor > 1)
    if plan.spec.layout.pipeline == 1:
        assert seconds["bubble"] == 0.0, "nobody waits, not even for as long as sums are rounded"
    if cluster == "a100":
        mfu = plan.rate(plan.flops.model_causal) / plan.peak_flops
        assert seconds["arithmetic"] / plan.time.seconds == pytest.approx(mfu)
        assert (seconds["bubble"] > 1e-9 * plan.time.seconds) == (plan.spec.layout.pipeline > 1)


@pytest.mark.parametrize("compile", [False, True])
def test_advice_to_compile_is_given_only_if_the_job_is_not_compiled(compile):
    shares = explained({}, compile=compile)[1].shares
    assert any("train.compile" in share.help for share in shares) == (not compile)


@pytest.mark.parametrize("parallel", LAYOUTS[1:])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_explained_timeline_has_every_pass_in_order(parallel, cluster):
    plan, explanation = explained(parallel, cluster)
    layout, m = plan.spec.layout, plan.spec.micro_batches
    kinds = 3 if layout.schedule.startswith("zb") else 2
    bars = explanation.bars
    assert {(bar.stage, bar.micro_batch) for bar in bars} == {
        (stage, number) for stage in range(layout.pipeline * layout.virtual_stages) for number in range(m)
    }
    whole = sum(1 for bar in bars if bar.kind != "backward_weight")
    assert whole == 2 * layout.pipeline * layout.virtual_stages * m
    assert len(bars) <= kinds * layout.pipeline * layout.virtual_stages * m
    for rank in range(layout.pipeline):
        own = [bar for bar in bars if bar.rank == rank]
        assert all(bar.begin < bar.end for bar in own)
        assert all(before.end <= bar.begin + 1e-12 for before, bar in pairwise(own))
    model = StepModel(plan.spec, CLUSTERS[cluster], engine_on(CLUSTERS[cluster].machine))
    assert max(bar.end for bar in bars) == pytest.approx(model.pipeline().simulated_seconds(m), rel=1e-9)


def test_effect_of_a_suggested_change_equals_a_plan_with_it():
    _, explanation = explained(LAYOUTS[1])
    changes = {each.change: each for each in explanation.changes}
    for change, parallel, train in (
        ("micro_batch_size: 4", {}, {"micro_batch_size": 4}),
        ("tensor: 8, data: 1", {"tensor": 8, "data": 1}, {}),
        ("schedule: zb-h1, virtual_stages: 1", {"schedule": "zb-h1"}, {}),
        ("recompute: full", {"recompute": "full"}, {}),
        ("zero: 0", {"zero": 0}, {}),
    ):
        other, _ = explained({**LAYOUTS[1], **parallel}, **train)
        assert changes[change].seconds == other.time.seconds
        assert changes[change].memory == other.memory.total
        assert changes[change].fits
    assert "tensor: 8, pipeline: 1" in changes
    assert not [change for change in changes if change.startswith("tensor: 16")], "groups stay on a node"
    fast = [each.seconds for each in explanation.changes if each.fits]
    assert fast == sorted(fast)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [({"schedule": "1f1b"}, (5, 9)), ({"schedule": "interleaved", "virtual_stages": 2}, (4, 3, 3, 4))],
)
def test_suggested_change_names_everything_it_changes(layout, counts):
    """A list of stages is not dropped in silence, nor where the same stages stay."""
    spec = job({"pipeline": 2, "data": 2, "stage_layers": counts, **layout})
    changes = what_ifs(spec, CLUSTERS["a100"])
    for each in changes:
        values = yaml.safe_load(f"{{{each.change}}}")
        section = "train" if "micro_batch_size" in values else "parallel"
        document = spec.model_dump(mode="json")
        other = JobSpec.model_validate({**document, section: document[section] | values})
        (plan,) = evaluate(other, CLUSTERS["a100"]).plans
        assert (each.seconds, each.memory) == (plan.time.seconds, plan.memory.total), each.change
    dropped = {each.change.split(",")[0] for each in changes if "stage_layers: null" in each.change}
    assert (
        "data: 4" in dropped and ("schedule: zb-v" in dropped) and ("schedule: gpipe" in dropped) == (len(counts) > 2)
    )


def test_suggested_micro_batch_never_exceeds_the_share_of_a_replica():
    specs = (job({"data": 2}, micro_batch_size=size) for size in (16, 32))
    changes = [{each.change for each in what_ifs(spec, CLUSTERS["a100"])} for spec in specs]
    assert "micro_batch_size: 32" in changes[0] and "micro_batch_size: 64" not in changes[1]


def test_largest_losses_of_a_plan_are_sentences_with_advice():
    _, explanation = explained(LAYOUTS[2])
    said = sentences(explanation.shares)
    assert 1 <= len(said) <= 3
    losses = sorted((each.seconds for each in explanation.shares if each.help), reverse=True)
    step = sum(each.seconds for each in explanation.shares)
    assert [sentence.split("%")[0] for sentence in said] == [f"{100 * each / step:.0f}" for each in losses[: len(said)]]
    assert all(" of the step: " in sentence and ". To reduce it: " in sentence for sentence in said)


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_plan_picture_is_valid_svg_with_a_bar_for_every_pass(parallel):
    _, explanation = explained(parallel)
    root = ElementTree.fromstring(picture("a <plan> & more", to_json(explanation)))
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(" of micro-batch " in title for title in titles) == len(explanation.bars)
    assert next(root.iter("{http://www.w3.org/2000/svg}text")).text == "a <plan> & more"
    assert not [each for each in root.iter() if each.tag.endswith(("script", "image", "foreignObject"))]


def test_plan_picture_shows_every_part_of_a_step():
    _, split = explained({"pipeline": 2, "context": 2})
    _, explanation = explained({"pipeline": 2, "offload_layers": 7})
    names = [[each.name for each in every.shares] for every in (explanation, split)]
    assert [each[-1] for each in names] == ["copies", "context"]
    assert {*names[0], *names[1], "expert"} == {part for parts, _ in GROUPS.values() for part in parts}
    assert "activation offload: copying activations of 7 layers a stage" in picture("offloaded", to_json(explanation))


def test_a_pipeline_with_too_many_passes_is_explained_without_a_timeline():
    _, explanation = explained(LAYOUTS[2], global_batch_size=4096, micro_batch_size=1)
    document = to_json(explanation)
    assert document["timeline"] is None
    assert "too many passes" in picture("large", document)


def test_explanation_of_a_run_that_never_ends_says_that_it_would_never_finish(monkeypatch):
    def never(run):
        raise NeverFinishes(f"it would never finish: {run.gpus}")

    monkeypatch.setattr("manta.service.planner.explain.advise", never)
    _, explanation = explained(LAYOUTS[1], steps=10**7)
    document = to_json(explanation)
    assert document["run"] is None and document["sentences"][-1] == "Of the whole training: it would never finish: 16."


@pytest.mark.parametrize(("elastic", "fewest"), [({}, 2), ({"min_data": 1}, 1)])
def test_fewest_replicas_of_the_advised_run_follow_the_elastic_settings(monkeypatch, elastic, fewest):
    runs = []
    monkeypatch.setattr("manta.service.planner.explain.advise", lambda run: runs.append(run))
    spec = job({"data": 2}, steps=10**7).model_copy(update={"elastic": ElasticConfig(**elastic)})
    explain(plan_of(spec, CLUSTERS["a100"]), CLUSTERS["a100"])
    assert [run.fewest for run in runs] == [fewest]


def test_plan_advice_covers_only_what_the_job_can_still_change():
    """Dropout refuses to be compiled; there is one replica, one sequence a micro-batch and one tensor rank."""
    spec = job({"zero": 0, "pipeline": 2, "schedule": "zb-h1"}, micro_batch_size=1)
    dropping = spec.model_copy(update={"model": spec.model.model_copy(update={"dropout": 0.1})})
    shares = explain(plan_of(dropping, CLUSTERS["measured"]), CLUSTERS["measured"]).shares
    said = " ".join(share.help for share in shares)
    for useless in ("train.compile", "smaller tensor", "smaller micro-batch", "fewer replicas", "zero"):
        assert useless not in said, said
    assert "a larger micro-batch" in said


@pytest.mark.parametrize(("layers", "batch", "is_advised"), [(8, 64, True), (8, 66, False), (7, 64, False)])
def test_virtual_stages_are_advised_only_if_layers_and_micro_batches_divide_evenly(layers, batch, is_advised):
    spec = job({"pipeline": 4}, global_batch_size=batch)
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"layers": layers})})
    shares = explain(plan_of(spec, CLUSTERS["a100"]), CLUSTERS["a100"]).shares
    (help,) = [share.help for share in shares if share.name == "bubble"]
    assert "; a zero-bubble schedule" in help and ("more virtual stages" in help) == is_advised


@pytest.mark.parametrize(
    ("layout", "batch", "size", "is_advised"),
    [
        ({"pipeline": 4, "schedule": "interleaved", "virtual_stages": 2}, 64, 4, True),
        ({"pipeline": 4, "schedule": "interleaved", "virtual_stages": 2}, 16, 4, False),
        ({"data": 2}, 26, 1, True),
        ({"data": 2}, 26, 13, False),
        ({"data": 2}, 52, 13, True),
        ({}, 8, 6, True),
    ],
)
def test_plan_advice_of_a_larger_micro_batch_requires_one_that_divides_evenly(layout, batch, size, is_advised):
    spec = job(layout, micro_batch_size=size, global_batch_size=batch)
    shares = explain(plan_of(spec, CLUSTERS["a100"]), CLUSTERS["a100"]).shares
    (help,) = [share.help for share in shares if share.name == "products"]
    assert ("larger micro-batch" in help) == is_advised


def test_explained_memory_of_unplaced_stages_is_that_of_the_smallest_device():
    """The slowest have more."""
    cluster = together([Cluster(machine_of(name), 1, 8) for name in ("a100-80gb", "l40s-48gb")])
    plan = plan_of(job({"pipeline": 2}), cluster)
    explanation = explain(plan, cluster)
    assert set(explanation.usable_bytes) == {min(map(usable_bytes, cluster.parts))}
    assert max(each.total for each in explanation.memory) == plan.memory.total


def test_suggested_layer_moves_go_to_and_from_each_end_once():
    lists = {
        (): [[2, 4, 4, 4], [4, 3, 4, 3], [4, 4, 4, 2], [3, 3, 4, 4]],
        (4, 4, 3, 3): [None, [5, 3, 3, 3], [4, 4, 4, 2], [3, 4, 3, 4]],
        (1, 5, 5, 3): [None, [2, 4, 5, 3], [2, 5, 5, 2], [1, 4, 5, 4]],
    }
    for counts, expected in lists.items():
        assert list(_lists(job({"pipeline": 4, "stage_layers": counts or None}))) == expected
    assert list(_lists(job({"pipeline": 2}))) == [[6, 8], [8, 6]]
    assert list(_lists(planned.job(34, pipeline=17))) == [] != list(_lists(planned.job(32, pipeline=16)))


def test_suggested_stage_counts_drop_stage_layers_and_zero_is_toggled():
    changes = {each.change for each in what_ifs(job({"pipeline": 4, "stage_layers": [4, 4, 3, 3]}), CLUSTERS["a100"])}
    assert {"tensor: 2, pipeline: 2, stage_layers: null", "schedule: zb-h1, virtual_stages: 1"} <= changes
    changes = {each.change for each in what_ifs(job({"data": 2, "zero": 0}), CLUSTERS["a100"])}
    assert "zero: 1" in changes and "zero: 0" not in changes
    assert not [each.change for each in what_ifs(job({}), CLUSTERS["a100"]) if each.change.startswith("zero")]


def test_suggested_changes_keep_the_number_of_placed_stages():
    """Which nodes others would be on is not known."""
    cluster = together([Cluster(machine_of(name), 1, 8) for name in ("a100-80gb", "l40s-48gb")])
    placed = job({"pipeline": 2, "tensor": 2, "data": 2, "stage_accelerators": ["A100", "L40S"]})
    changes = {each.change for each in what_ifs(placed, cluster)}
    assert "tensor: 4, data: 1" in changes
    assert not [change for change in changes if "pipeline" in change]


def test_suggested_changes_that_fit_precede_faster_ones_that_do_not():
    spec, cluster = job({"pipeline": 2, "recompute": "selective"}), CLUSTERS["a100"]
    needed = fits(spec, cluster).memory.total
    device = replace(cluster.machine.accelerator, memory_bytes=1.2 * needed)
    changes = what_ifs(spec, replace(cluster, machine=replace(cluster.machine, accelerator=device)))
    order = [(not each.fits, each.seconds) for each in changes]
    assert order == sorted(order)
    assert min(each.seconds for each in changes if not each.fits) < max(each.seconds for each in changes if each.fits)


def test_plan_advice_depends_on_the_sizes_of_the_layout():
    def shares(parallel, **train):
        return {each.name: each for each in explained(parallel, **train)[1].shares}

    alone, whole_batch, staged = shares({}), shares({}, micro_batch_size=64), shares({"pipeline": 4})
    assert "a larger micro-batch" in alone["products"].help
    assert whole_batch["products"].help == ""
    assert "a smaller micro-batch" in staged["bubble"].help
    assert staged["gradients"].what == "the embedding's gradients, which the first and the last stage hold"
    assert "host memory" not in alone["optimizer"].what
    assert "train.optimizer.offload: false" in shares({}, optimizer={"offload": True})["optimizer"].help


def test_explained_bubble_names_the_busiest_rank_and_its_excess_over_the_mean():
    plan, explanation = explained({"pipeline": 4})
    work = StepModel(plan.spec, CLUSTERS["a100"]).pipeline().rank_work()
    bubble = next(each for each in explanation.shares if each.name == "bubble")
    more = max(work) / (sum(work) / 4) - 1
    assert more > 0.1 and f"where rank {work.index(max(work))} has {more:.0%} more work" in bubble.what
