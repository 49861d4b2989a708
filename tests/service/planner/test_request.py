"""What a plan is asked for with: every mistake is a sentence with its path, and answers have the contract's keys."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from manta.service.planner.answer import to_json
from manta.service.planner.beside_steps import beside_steps
from manta.service.planner.hardware import ASSUMED_CORE, Cluster, CpuNode, machine_of
from manta.service.planner.memory import fits
from manta.service.planner.request import (
    PlanRequest,
    cluster_of_nodes,
    for_job,
    read_request,
)
from manta.service.planner.sizes import elastic_sizes
from manta.service.planner.step_time import step_model
from manta.workers.config import ResourcesConfig
from manta.workers.spec.problems import SpecError
from tests.service.support.planned import job

DOCUMENT: dict[str, Any] = {
    "model": {"layers": 8, "hidden_size": 1024, "heads": 16, "sequence_length": 512, "vocabulary_size": 32000},
    "train": {"global_batch_size": 64, "precision": "bf16", "steps": 100},
    "cluster": {"accelerator": "a100-80gb", "nodes": 2, "gpus_per_node": 8},
    "parallel": "auto",
}


NODE = CpuNode(4, 8e9)

DEEP = DOCUMENT["model"] | {"layers": 600}


def here(accelerator: str | None) -> Cluster:
    """The current cluster, of CPU slots or of what is said."""
    return Cluster(machine_of(accelerator) if accelerator else NODE.machine(4), 1, 4)


def read(**changes: Any) -> PlanRequest:
    return read_request({**copy.deepcopy(DOCUMENT), **changes}, here, NODE)


def broken(**changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        read(**changes)
    return {problem.path: problem.rule for problem in caught.value.problems}


def test_plan_answer_has_all_keys_that_clients_rely_on():
    wanted = read()
    answer = to_json(wanted, wanted.answer())
    best = answer["plans"][0]
    assert {
        "parallel", "micro_batch_size", "step_seconds", "tokens_per_second", "tflops_per_gpu",
        "hardware_tflops_per_gpu", "mfu_full", "mfu_causal", "hfu_full", "bubble_ratio", "memory_bytes",
    } <= best.keys()  # fmt: skip
    assert {"parameters", "gradients", "optimizer", "activations", "total"} <= best["memory_bytes"].keys()
    assert 0 < best["mfu_causal"] < best["mfu_full"] <= best["hfu_full"] < 1
    assert best["tokens_per_second"] == pytest.approx(64 * 512 / best["step_seconds"])
    assert best["tflops_per_gpu"] == pytest.approx(312 * best["mfu_full"])
    assert best["gpu_hours"] == pytest.approx(best["gpus"] * best["step_seconds"] * 100 / 3600)
    assert sum(best["step_parts"].values()) == pytest.approx(best["step_seconds"])
    assert {"parallel", "reason"} == answer["rejected"][0].keys()
    json.dumps(answer, allow_nan=False)


def test_plan_of_a_given_layout_evaluates_exactly_that_layout():
    layout = {"tensor": 2, "pipeline": 2, "data": 2, "recompute": "full"}
    wanted = read(parallel=layout, train={"global_batch_size": 64, "precision": "bf16", "micro_batch_size": 1})
    answer = wanted.answer()
    (plan,) = answer.plans
    (said,) = to_json(wanted, answer)["plans"]
    assert said["gpu_hours"] == pytest.approx(8 * said["hours"])
    assert said["hardware_tflops_per_gpu"] == pytest.approx(312 * said["hfu_full"])
    assert said["hfu_full"] > 1.2 * said["mfu_full"]
    layout = plan.spec.layout
    assert (layout.tensor, layout.pipeline, layout.data, plan.spec.train.micro_batch_size) == (2, 2, 2, 1)


def test_plan_request_accepts_the_keys_of_a_complete_job_file():
    jobs_own = {"name": "mine", "data": {"source": "python-stdlib"}, "checkpoint": {"keep": 2}, "priority": 3}
    assert read(**jobs_own).answer().plans


@pytest.mark.parametrize(
    ("cluster", "path", "words"),
    [
        (None, "cluster", "required, but missing"),
        ("a100", "cluster", "must be a mapping"),
        ({"accelerator": "a1000"}, "cluster.accelerator", "known are v100-32gb"),
        ({"nodes": 2}, "cluster.accelerator", "must name the nodes' accelerators"),
        ({"accelerator": 7, "nodes": 1}, "cluster.accelerator", "must be a string"),
        ({"accelerator": "a100", "nodes": 0}, "cluster.nodes", "must be an integer from 1"),
        ({"accelerator": "a100", "nodes": True}, "cluster.nodes", "must be an integer from 1"),
        ({"accelerator": "a100", "gpus_per_node": 65}, "cluster.gpus_per_node", "from 1 to 64"),
        ({"accelerator": "a100", "racks": 3}, "cluster.racks", "unknown key"),
        ({"current": "yes"}, "cluster.current", "must be true or false"),
        ({"current": True, "nodes": 2, "gpus_per_node": 4}, "cluster.current", "leave out nodes and gpus_per_node, or"),
        ({"groups": []}, "cluster.groups", "must list 1 to 4 kinds of nodes, not 0"),
        ({"groups": 5 * [{"accelerator": "a100"}]}, "cluster.groups", "must list 1 to 4 kinds of nodes, not 5"),
        ({"groups": 4 * [{"accelerator": "a100"}]}, "cluster.groups", "GPU type A100 for two groups"),
        ({"groups": [{"accelerator": "a100"}, 3]}, "cluster.groups", "must be a list of mappings"),
        ({"groups": [{"accelerator": "a100"}], "nodes": 2}, "cluster.groups", "leave out nodes"),
        (
            {"groups": [{"accelerator": "a100"}, {"nodes": 2}]},
            "cluster.groups.1.accelerator",
            "must name the nodes' accelerators",
        ),
        ({"groups": [{"accelerator": "a100", "current": True}]}, "cluster.groups.0.current", "unknown key"),
        (
            {"groups": [{"accelerator": "a100"}, {"accelerator": "cpu"}]},
            "cluster.groups.1.accelerator",
            "only span nodes with GPUs",
        ),
        (
            {"groups": [{"accelerator": "a100"}, {"accelerator": "a100-40gb"}]},
            "cluster.groups",
            "GPU type A100 for two groups",
        ),
    ],
)
def test_plan_request_with_an_invalid_cluster_names_path_and_reason(cluster, path, words):
    assert words in broken(cluster=cluster)[path]


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"modle": {}}, "modle", "unknown key"),
        ({"model": {"layers": 2}}, "model.hidden_size", "required, but missing"),
        ({"model": DOCUMENT["model"] | {"heads": 7}}, "model.heads", "must divide hidden_size"),
        ({"model": DOCUMENT["model"] | {"family": "custom", "entrypoint": "a:b"}}, "model.family", "are unknown"),
        ({"model": DOCUMENT["model"] | {"layers": 1001}}, "model.layers", "up to 1000 layers"),
        ({"train": {"global_batch_size": 0}}, "train.global_batch_size", "must be above 0"),
        ({"train": 3}, "train", "must be a mapping"),
        ({"parallel": "best"}, "parallel", "must be a mapping"),
        ({"parallel": {"tensor": 3}}, "parallel.tensor", "must divide model.heads"),
        ({"parallel": {"zero": 3, "pipeline": 2}}, "parallel.zero", "which a pipeline of 2 stages has"),
        ({"parallel": {"pipeline": 300}, "model": DEEP}, "parallel.pipeline", "up to 256"),
        ({"train": {"global_batch_size": 200_001}, "parallel": {}}, "train.global_batch_size", "micro-batches"),
        (
            {"model": {key: value for key, value in DOCUMENT["model"].items() if key != "vocabulary_size"},
             "data": {"source": "text", "paths": ["a.txt"], "tokenizer": "mine.json"}},
            "model.vocabulary_size",
            "is not read for a plan",
        ),
    ],
)  # fmt: skip
def test_plan_request_with_an_invalid_job_names_path_and_reason(changes, path, words):
    assert words in broken(**changes)[path]


def test_plan_request_that_is_no_mapping_is_refused():
    with pytest.raises(SpecError, match="a plan request is a mapping, not a list"):
        read_request([DOCUMENT], here, NODE)


def test_plan_request_for_the_current_cluster_uses_it():
    assert read(cluster={"current": True}).cluster.machine.accelerator.name == "cpu"
    assert read(cluster={"current": True, "accelerator": "h100"}).cluster.machine is machine_of("h100")


def test_plan_for_cpu_uses_the_constants_of_this_node():
    core = replace(ASSUMED_CORE, product_fp32=1e12)
    document = {**copy.deepcopy(DOCUMENT), "cluster": {"accelerator": "cpu", "nodes": 2, "gpus_per_node": 8}}
    cluster = read_request(document, here, CpuNode(4, 8e9, core)).cluster
    assert (cluster.nodes, cluster.gpus_per_node, cluster.machine.cores) == (2, 8, 4)
    assert cluster.machine.core == core and not cluster.machine.is_assumed
    one = read(cluster={"accelerator": "cpu"}).cluster
    assert (one.nodes, one.gpus_per_node) == (1, 4) and one.machine.is_assumed


def node(accelerator: str, total: int, alive: bool = True) -> dict[str, Any]:
    return {"accelerator": accelerator, "total": total, "alive": alive}


def test_plan_request_takes_the_most_common_node_size_of_the_cluster():
    nodes = [node("cpu", 16), node("cpu", 16), node("cpu", 2), node("cpu", 16, alive=False), node("cpu", 0)]
    cluster = cluster_of_nodes(nodes, None, CpuNode(8, 32e9))
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 16)
    assert cluster_of_nodes([*nodes, node("cpu", 24)], None, NODE).nodes == 3, "a larger one has room for as many"
    assert cluster.machine.accelerator.memory_bytes == 2e9
    with pytest.raises(SpecError, match="no node"):
        cluster_of_nodes([], None, NODE)


def test_plan_for_a_gpu_cluster_ignores_nodes_without_gpus():
    """A head with the usual 16 slots has no room for ranks that take GPUs."""
    h100 = node("gpu", 8) | {"gpu_type": "H100"}
    for gpu_nodes in (1, 2):
        cluster = cluster_of_nodes([node("cpu", 16), *[h100] * gpu_nodes], None, NODE)
        assert (cluster.machine, cluster.nodes, cluster.gpus_per_node) == (machine_of("h100"), gpu_nodes, 8)
    with pytest.raises(SpecError, match=r"cluster.current: this cluster has no node with GPUs for jobs"):
        cluster_of_nodes([node("cpu", 16)], "h100", NODE)


def test_cpu_plan_uses_only_the_slots_of_gpu_and_cpu_nodes():
    nodes = [node("gpu", 8) | {"slots_total": 4}, node("gpu", 8) | {"slots_total": 0}, node("cpu", 4)]
    cluster = cluster_of_nodes(nodes, "cpu", NODE)
    assert not cluster.machine.has_gpus and (cluster.nodes, cluster.gpus_per_node) == (2, 4)


@pytest.mark.parametrize("left", [{"draining": True}, {"problem": "its disk is full"}])
def test_plan_request_leaves_out_nodes_on_which_nothing_is_placed(left):
    h100 = node("gpu", 8) | {"gpu_type": "H100", "draining": False, "problem": None}
    assert cluster_of_nodes([h100, h100 | left], None, NODE).nodes == 1
    with pytest.raises(SpecError, match="no node"):
        cluster_of_nodes([h100 | left, node("cpu", 4)], None, NODE)  # and not the slots: its jobs wait for GPUs


def test_plan_request_for_gpus_of_unknown_type_needs_a_name():
    with pytest.raises(SpecError, match="Ray does not know the type of this cluster's GPUs: name it"):
        cluster_of_nodes([node("gpu", 8)], None, NODE)
    with pytest.raises(SpecError, match="no plans can be made for this cluster's GPUs of type T4; known are v100"):
        cluster_of_nodes([node("gpu", 8) | {"gpu_type": "T4"}], None, NODE)
    assert cluster_of_nodes([node("gpu", 8)], "h100", NODE).machine is machine_of("h100")


@pytest.mark.parametrize(
    ("gpu_type", "memory", "name"),
    [
        ("H100", None, "h100-80gb"),
        ("A100", None, "a100-80gb"),
        ("A100", 42_949_672_960, "a100-40gb"),
        ("A100", 85_899_345_920, "a100-80gb"),
        ("A100-40G", None, "a100-40gb"),
        ("V100", 16_945_512_448, "v100-16gb"),
        ("L40S", 48_318_382_080, "l40s-48gb"),
    ],
)
def test_plan_request_takes_the_accelerator_from_the_gpu_type_unless_it_is_given(gpu_type, memory, name):
    nodes = [node("gpu", 8) | {"gpu_type": gpu_type, "gpu_memory_bytes": memory}] * 2 + [node("cpu", 4)]
    cluster = cluster_of_nodes(nodes, None, NODE)
    assert cluster.machine is machine_of(name)
    assert cluster_of_nodes(nodes, "b200", NODE).machine is machine_of("b200"), "what is said counts"


def test_plan_request_separates_nodes_by_type_most_capable_first():
    known = {"gpu_type": "A100", "gpu_memory_bytes": 42_949_672_960}
    larger, none_left = {"gpu_type": "A100", "gpu_memory_bytes": 85_899_345_920}, {"gpu_type": "H100"}
    nodes = [node("gpu", 4) | {"gpu_type": "V100"}] * 3 + [node("gpu", 8) | each for each in (known, larger)]
    nodes += [node("cpu", 4), node("gpu", 0) | none_left]
    cluster = cluster_of_nodes([*nodes, node("gpu", 8) | {"gpu_type": "T4"}], None, NODE)
    assert [(part.type, part.machine.accelerator.name, part.nodes, part.gpus_per_node) for part in cluster.parts] == [
        ("A100", "a100-40gb", 2, 8), ("V100", "v100-32gb", 3, 4),
    ]  # fmt: skip
    groups = [{"accelerator": "v100-32gb", "nodes": 3, "gpus_per_node": 4}, {"accelerator": "a100-40gb", "nodes": 2}]
    assert read(cluster={"groups": groups}).cluster == cluster
    assert cluster_of_nodes(nodes, "h100", NODE).others == (), "what is said counts for all"
    few = [{"accelerator": "a100-40gb", "nodes": 1, "gpus_per_node": 1}, groups[0]]
    assert read(cluster={"groups": few}).cluster.type == "V100"


def test_plan_request_uses_gpus_or_slots_as_the_job_asks():
    asked, slots = [], NODE.machine(4)

    def current(accelerator):
        asked.append(accelerator)
        return Cluster(slots, 1, 4)

    def taken(accelerator, said=None):
        spec = job().model_copy(update={"resources": ResourcesConfig(accelerator=accelerator)})
        return for_job(spec, current)(said)

    assert taken("cpu").machine is taken("auto").machine is taken("cpu", "h100").machine is slots
    assert asked == ["cpu", None, "h100"]
    with pytest.raises(SpecError, match=r"resources\.accelerator: the job needs GPUs, and this cluster"):
        taken("gpu")


@pytest.mark.parametrize(("wanted", "described", "sentence"), [
    ("cpu", {"accelerator": "h100"}, "the job uses CPU slots, but this cluster has GPUs"),
    ("cpu", {"groups": [{"accelerator": "h100"}, {"accelerator": "a100"}]}, "the job uses CPU slots"),
    ("gpu", {"accelerator": "cpu"}, "the job needs GPUs, and this cluster has none"),
])  # fmt: skip
def test_plan_request_checks_a_described_cluster_against_the_jobs_accelerator(wanted, described, sentence):
    with pytest.raises(SpecError, match=rf"resources\.accelerator: {sentence}"):
        read(cluster=described, resources={"accelerator": wanted})
    assert read(cluster=described, resources={"accelerator": "auto"})


def test_plan_that_fits_nowhere_names_a_cluster_that_would_do():
    huge = {"layers": 128, "hidden_size": 25600, "heads": 160, "sequence_length": 2048, "vocabulary_size": 51200}
    wanted = read(model=huge, train={"global_batch_size": 512})
    answer = wanted.answer()
    assert answer.plans == () and "nodes of 8" in answer.rejected[0].reason


def test_plan_on_cpu_mentions_no_gpus_in_its_reasons():
    cluster = {"accelerator": "cpu", "nodes": 1, "gpus_per_node": 4}
    deep = DOCUMENT["model"] | {"layers": 96}
    reasons = [
        read(cluster=cluster, **changes).answer().rejected[0].reason
        for changes in ({"model": deep}, {"model": deep, "parallel": {}}, {"parallel": {"data": 8}})
    ]
    assert all("GPU" not in reason for reason in reasons), reasons
    assert "GiB that a rank may use" in reasons[0] and "GiB per rank) would be enough" in reasons[0]
    assert reasons[2] == "needs 8 slots in groups of 1 on one node; 1 node of 4 has room for 4 such groups, not 8"


def test_plan_for_unequal_nodes_places_each_stage_and_answers_for_all_of_them():
    groups = [{"accelerator": "h100", "nodes": 1, "gpus_per_node": 2}, {"accelerator": "a100", "gpus_per_node": 4}]
    model = DOCUMENT["model"] | {"hidden_size": 4096, "heads": 32, "sequence_length": 2048}
    train = DOCUMENT["train"] | {"validate_every": 10}
    data = {"source": "megatron", "paths": ["corpus.bin"], "validation_fraction": 0.1}
    wanted = read(cluster={"groups": groups}, model=model, train=train, data=data, sizes=True, explain=True)
    answer = to_json(wanted, wanted.answer())
    first, explained = answer["plans"][0], answer["explanation"]
    stages = first["parallel"]["pipeline"]
    assert set(first["parallel"]["stage_accelerators"]) == {"H100", "A100"}
    assert len(explained["usable_by_stage"]) == len(explained["memory_by_stage"]) == stages
    assert sum(share["seconds"] for share in explained["shares"]) == pytest.approx(first["step_seconds"])
    json.dumps(answer, allow_nan=False)
    best = wanted.answer().plans[0]
    assert [row["nodes"] for row in answer["sizes"]] == [{"H100": 1, "A100": 1}, {"A100": 1}, {"H100": 1}]
    beside = beside_steps(step_model(best.spec, wanted.cluster), best.time)
    assert answer["plans"][0]["beside_steps"] == beside.to_json() and beside.validation_seconds > 0
    steps = train["steps"] * best.time.seconds
    assert answer["plans"][0]["hours"] == pytest.approx((steps + beside.seconds) / 3600)
    assert beside.seconds > 0.001 * steps
    assert answer["note"].startswith("H100: estimates use")
    fixed = read(
        cluster={"groups": groups}, model=model, parallel={"tensor": 1, "data": 4}, elastic={"min_data": 1}, sizes=True
    )
    rows = to_json(fixed, fixed.answer())["sizes"] or []
    assert [row["fits"] for row in rows] == [
        fits(plan.plan.spec, fixed.cluster).fits for plan in elastic_sizes(fixed.job, fixed.cluster)
    ]


def test_plan_request_treats_null_groups_as_absent():
    assert read(cluster=DOCUMENT["cluster"] | {"groups": None}).cluster == read().cluster


def test_limits_of_a_fixed_layouts_size_are_checked_as_at_submission():
    layout = {"tensor": 2, "data": 2}
    assert broken(parallel=layout, elastic={"min_data": 4}) == {"elastic.min_data": "must be at most parallel.data (2)"}
    assert "has no samples for some" in broken(parallel=layout, elastic={"max_data": 65})["elastic.max_data"]
    assert read(elastic={"min_data": 4}).answer().plans
