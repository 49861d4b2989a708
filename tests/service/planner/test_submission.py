"""What is decided for a job at its submission, for clusters with and without GPUs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manta.service.planner.hardware import Cluster, CpuNode, machine_of
from manta.service.planner.search import evaluate
from manta.service.planner.submission import (
    Decided,
    decide,
    leaves_layout,
    memory_problem,
    not_decided,
    without_layout,
)
from manta.service.stored_specs import as_written
from manta.workers.config import JobSpec
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.rules import find_problems

MODEL = {"layers": 8, "hidden_size": 1024, "heads": 16, "sequence_length": 512, "vocabulary_size": 32000}
LARGE = MODEL | {"layers": 32, "hidden_size": 4096, "heads": 32, "sequence_length": 4096}
CPUS = Cluster(CpuNode(8, 32e9).machine(8), 1, 8)


def gpus(count: int, name: str = "h100-80gb") -> Cluster:
    return Cluster(machine_of(name), 1, count)


def document(**changes) -> dict:
    train = {"steps": 10, "global_batch_size": 64} | changes.pop("train", {})
    return {"model": MODEL, "data": {"source": "megatron", "paths": ["corpus"]}, "train": train, **changes}


def decided(given: dict, cluster: Cluster, free: Cluster | None = None) -> Decided:
    spec = parse_job_spec(without_layout(given) if leaves_layout(given) else given)
    return decide(spec, given, cluster, free)


def chosen(answer: Decided) -> tuple[int, str, int]:
    return answer.spec.layout.world_size, answer.spec.train.precision, answer.spec.train.micro_batch_size


@pytest.mark.parametrize(
    ("given", "cluster", "ranks", "precision", "notes"),
    [
        ({}, gpus(8), 8, "bf16", ["fits on 8 GPUs", "train.precision: bf16", "micro_batch_size"]),
        ({"parallel": "auto"}, gpus(8), 8, "bf16", ["fits on 8 GPUs", "precision", "micro_batch_size"]),
        ({"elastic": {"max_data": 2}}, gpus(2), 2, "bf16", ["2 GPUs", "precision", "micro_batch_size"]),
        ({}, gpus(8, "v100-32gb"), 8, "fp32", ["fits on 8 GPUs", "micro_batch_size"]),
        ({"train": {"precision": "fp32"}}, gpus(1), 1, "fp32", ["fits on 1 GPU,", "micro_batch_size"]),
        ({"parallel": {"data": 2}}, gpus(8), 2, "bf16", ["precision", "micro_batch_size"]),
        ({"parallel": {"zero": 0}}, gpus(8), 1, "bf16", ["precision", "micro_batch_size", "1 of 8 GPUs used"]),
        ({"train": {"micro_batch_size": 1, "precision": "bf16"}, "parallel": {"data": 2}}, gpus(8), 2, "bf16", []),
        ({}, CPUS, 1, "fp32", ["1 of 8 slots used; `parallel: auto` looks for a faster layout on all 8"]),
        ({"elastic": {"max_data": 4}}, CPUS, 1, "fp32", ["1 of 8 slots used"]),
        ({"parallel": "auto", "train": {"micro_batch_size": 1}}, CPUS, 1, "fp32", ["fits on 8 slots"]),
        ({"parallel": {"tensor": 2}}, CPUS, 2, "fp32", []),
    ],
)
def test_keys_left_out_are_decide_the_cluster(given, cluster, ranks, precision, notes):
    answer = decided(document(**given), cluster)
    assert chosen(answer)[:2] == (ranks, precision)
    assert len(answer.notes) == len(notes) and all(map(str.__contains__, answer.notes, notes)), answer.notes
    assert find_problems(answer.spec) == []


def test_decided_micro_batch_size_is_the_fastest_that_fits():
    layout = {"tensor": 2, "data": 4}
    answer = decided(document(model=LARGE, parallel=layout), gpus(8))
    plans = []
    for size in (1, 2, 4, 8, 16):
        train = {"micro_batch_size": size, "precision": "bf16"}
        spec = parse_job_spec(document(model=LARGE, parallel=layout, train=train))
        plans += [(plan.time.seconds, size) for plan in evaluate(spec, gpus(8)).plans]
    assert 1 < len(plans) < 5 and answer.spec.train.micro_batch_size == min(plans)[1]


@pytest.mark.parametrize(("model", "free", "ranks"), [(MODEL, gpus(3), 3), (LARGE, gpus(1), 8), (MODEL, None, 8)])
def test_layout_uses_free_gpus_or_all_of_them_if_it_fits_on_none_that_are_free(model, free, ranks):
    answer = decided(document(model=model, train={"micro_batch_size": 1}), gpus(8), free)
    assert answer.spec.layout.world_size == ranks
    assert (f"{ranks} free GPUs" in answer.notes[0]) == (ranks == 3)


def test_what_a_user_wrote_shows_no_decision_and_is_decided_anew_elsewhere():
    given = document()
    spec = parse_job_spec(given)
    assert as_written(spec) == given
    sizes = {decided(as_written(spec), each).spec.layout.world_size for each in (CPUS, gpus(2), gpus(8))}
    assert sizes == {1, 2, 8}


def test_job_for_a_cluster_that_cannot_be_planned_has_plain_defaults_or_is_refused_for_auto():
    unknown = SpecError([Problem("cluster", "no plans can be made for GPUs of type T4")])
    answer = not_decided(parse_job_spec(document()), document(elastic={"max_data": 2}), unknown)
    assert chosen(answer) == (1, "fp32", 1) and answer.spec.elastic.max_data == 2
    assert answer.notes == ("keys left out have their plain defaults: no plans can be made for GPUs of type T4",)
    with pytest.raises(SpecError, match="type T4"):
        not_decided(parse_job_spec(document()), document(parallel="auto"), unknown)
    with pytest.raises(SpecError, match=r"elastic\.min_data"):
        not_decided(parse_job_spec(document()), document(elastic={"min_data": 0}), unknown)


def test_layout_of_a_custom_model_is_one_rank_since_none_can_be_planned():
    custom = document(model=MODEL | {"family": "custom", "entrypoint": "mine.model:build"})
    answer = decided(custom, gpus(8))
    assert chosen(answer) == (1, "bf16", 1)
    assert answer.notes[-1] == "1 of 8 GPUs used; the parts of a custom model are unknown"


@pytest.mark.parametrize(
    ("given", "cluster", "sentence"),
    [
        ({"model": LARGE, "parallel": {"data": 2}}, gpus(8), r"parallel: does not fit: .* GiB that a rank may use"),
        ({"model": LARGE, "parallel": {}}, gpus(8), r"does not fit: .*\(try: auto\)"),
        ({"model": LARGE}, gpus(1), r"parallel: no layout of this job fits on this cluster"),
        ({"model": LARGE}, CPUS, r"does not fit: .* the 29\.8 GiB that a rank may use"),
    ],
)
def test_job_that_fits_on_no_node_is_refused_with_what_is_missing(given, cluster, sentence):
    with pytest.raises(SpecError, match=sentence):
        decided(document(**given), cluster)


def test_memory_of_a_cpu_node_is_shared_by_its_ranks_only_and_the_reserve_of_gpus_counts():
    def spec(**changes) -> JobSpec:
        return parse_job_spec(document(**changes))

    small_node = Cluster(CpuNode(8, 3e9).machine(8), 1, 8)
    assert evaluate(spec(), small_node).plans == (), "a share of an eighth is too small"
    assert memory_problem(spec(), small_node) is None
    assert memory_problem(spec(parallel={"data": 8}), small_node) is not None
    plan = evaluate(spec(model=LARGE, parallel={"tensor": 8}, train={"precision": "bf16"}), gpus(8)).plans[0]
    for room, fits in ((1.01, True), (0.99, False)):
        device = replace(machine_of("h100-80gb").accelerator, memory_bytes=plan.memory.total * room)
        full = Cluster(replace(machine_of("h100-80gb"), accelerator=device), 1, 8)
        assert (memory_problem(plan.spec, full) is None) == fits
