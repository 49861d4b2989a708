"""The search finds what trying everything finds, quickly, always the same, and says why others lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from manta.service.planner import candidates as candidates_module
from manta.service.planner.bounds import Bounds
from manta.service.planner.candidates import METHODS, Candidate, candidates, is_complete, micro_batch_sizes, schedules
from manta.service.planner.hardware import Cluster, Gpu, cpu_machine, machine_of, measured
from manta.service.planner.memory import usable_bytes, worst_rank
from manta.service.planner.search import Best, evaluate, fastest, search, smallest_cluster
from manta.service.planner.software import engine_on
from manta.service.planner.step_time import StepModel
from manta.workers.config import ElasticConfig, JobSpec, LoraConfig
from manta.workers.spec.divisors import divisors
from manta.workers.spec.rules import find_problems
from tests.service.support.planned import a100s, job

FROZEN = ["embedding", "layers.0-22"]
PAPERS = {"sequence_length": 2048, "vocabulary_size": 51200, "dropout": 0.1}


def paper(layers: int, hidden: int, heads: int, batch: int) -> JobSpec:
    return job(layers, hidden, heads, model=PAPERS, train={"global_batch_size": batch})


def sizes(spec: JobSpec) -> tuple[int, int, int]:
    return spec.layout.tensor, spec.layout.pipeline, spec.layout.data


def everything(spec: JobSpec, cluster: Cluster) -> Iterator[JobSpec]:
    """All layouts that the rules allow, with all lists of layers."""
    model, batch = spec.model, spec.train.global_batch_size
    for tensor in divisors(model.heads):
        groups = cluster.nodes * (cluster.gpus_per_node // tensor)
        for pipeline in range(1, min(groups, model.layers) + 1):
            for data in range(1, min(groups // pipeline, batch) + 1):
                for micro_batch in divisors(-(-batch // data)):
                    yield from _variants(spec, (tensor, pipeline, data, micro_batch))


def _variants(spec: JobSpec, at: tuple[int, int, int, int]) -> Iterator[JobSpec]:
    tensor, pipeline, data, micro_batch = at
    kinds = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-v", 2)]
    kinds += [("interleaved", v) for v in range(2, spec.model.layers // pipeline + 1)]
    for schedule, virtual_stages in kinds if pipeline > 1 else kinds[:1]:
        for recompute, counts in itertools.product(
            ("none", "selective", "full"), compositions(spec.model.layers, pipeline * virtual_stages)
        ):
            candidate = Candidate(pipeline, tensor, data, virtual_stages, schedule, micro_batch, recompute, counts)
            variant = candidate.spec(spec)
            if not find_problems(variant):
                yield variant


def compositions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to have so many layers on so many virtual stages."""
    for ends in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, layers)))


def drawn(seed: int) -> tuple[JobSpec, Cluster]:
    """A small job on a small cluster whose memory may be short."""
    draw = random.Random(seed)
    heads = draw.choice([4, 6, 8, 12])
    spec = job(
        draw.randint(2, 8),
        heads * draw.choice([64, 128]),
        heads,
        model={"dropout": draw.choice([0.0, 0.1]), "vocabulary_size": draw.choice([1000, 32000, 100000])},
        train={"global_batch_size": draw.choice([6, 8, 12, 16, 24])},
    )
    cluster = a100s(draw.randint(1, 3), draw.choice([2, 3, 4]))
    device = replace(cluster.machine.accelerator, memory_bytes=draw.choice([1e9, 4e9, 80e9]))
    return spec, replace(cluster, machine=replace(cluster.machine, accelerator=device))


def drawn_on_cores(seed: int) -> tuple[JobSpec, Cluster]:
    """The same on nodes whose ranks share cores."""
    (spec, cluster), draw = drawn(seed), random.Random(seed)
    slots = cluster.gpus_per_node
    memory = slots * cluster.machine.accelerator.memory_bytes
    return spec, Cluster(cpu_machine(slots, draw.randint(1, slots), memory), cluster.nodes, slots)


def drawn_on_measured(seed: int) -> tuple[JobSpec, Cluster]:
    """The same on GPUs that were measured, compiled or not."""
    spec, cluster = drawn(seed)
    gpu = Gpu(2.4e14, 1.5e13, 1.8e14, 1.6e12, 1.2e12, 3e-6, 1e-5, 2e10)
    train = spec.train.model_copy(update={"compile": seed % 2 == 1})
    return spec.model_copy(update={"train": train}), replace(cluster, machine=measured(cluster.machine, gpu))


@pytest.mark.parametrize(
    "seed", [seed if seed in (2, 31, 43, 45) else pytest.param(seed, marks=pytest.mark.soak) for seed in range(50)]
)
def test_search_finds_a_layout_within_two_percent_of_the_best(seed):
    """In what always runs the best is uneven, recomputes, is a zb-v, or has little room."""
    spec, cluster = drawn(seed)
    plans = search(spec, cluster).plans
    enough = plans[0].time.seconds / 1.02 if plans else float("inf")
    faster = (each for each in everything(spec, cluster) if StepModel(each, cluster).time().seconds < enough)
    assert [each.layout for each in faster if worst_rank(each).total <= usable_bytes(cluster)] == []


def test_large_searches_skip_chunked_schedules_of_very_deep_pipelines():
    """Each simulation of them takes seconds."""
    kinds = dict.fromkeys(schedules(1000, 250, True, False))
    assert list(kinds) == [("1f1b", 1), ("zb-h1", 1)]
    assert ("interleaved", 4) in set(schedules(1000, 250, True, True))
    assert {("zb-v", 2), ("interleaved", 2)} <= set(schedules(1000, 125, True, False))


def test_memory_count_stops_once_a_layout_is_known_not_to_fit():
    spec = job(8, 1024, 16, pipeline=4, data=2)
    whole = worst_rank(spec)
    assert worst_rank(spec, usable=whole.total) == whole
    first = worst_rank(spec, usable=1.0)
    assert first.rank == 0
    assert 1.0 < first.total <= whole.total


def drawn_large(seed: int) -> tuple[JobSpec, Cluster]:
    """A job of which not every size is looked at: more than 2048 GPUs times layers."""
    draw = random.Random(seed)
    heads, layers = draw.choice([12, 16, 20, 24, 32, 96]), draw.choice([17, 24, 30, 36, 40, 48])
    nodes = candidates_module.COMPLETE // (8 * layers) + draw.randint(1, 4)
    train = {"global_batch_size": draw.choice([60, 96, 128, 192, 250])}
    model = {"sequence_length": draw.choice([1024, 2048])}
    return job(layers, heads * draw.choice([64, 128]), heads, model=model, train=train), a100s(nodes)


@pytest.mark.parametrize(
    "seed", [seed if seed < 1 else pytest.param(seed, marks=pytest.mark.soak) for seed in range(40)]
)
def test_layouts_skipped_by_large_searches_are_at_most_two_percent_faster(seed, monkeypatch):
    spec, cluster = drawn_large(seed)
    assert not is_complete(spec, cluster)
    plan = search(spec, cluster, limit=1).plans[0]
    monkeypatch.setattr(candidates_module, "COMPLETE", 10**9)
    assert plan.time.seconds <= 1.02 * search(spec, cluster, limit=1).plans[0].time.seconds


def test_search_can_be_limited_to_a_number_of_ranks():
    spec = job(8, 1024, 16, train={"global_batch_size": 24})
    for ranks in (1, 5, 8):
        assert all(plan.spec.layout.world_size == ranks for plan in search(spec, a100s(), ranks=ranks).plans)
    assert search(spec, a100s(), ranks=9).plans == ()


def drawn_with_offload(seed: int) -> tuple[JobSpec, Cluster]:
    """The optimizer's state of which lies in host memory."""
    spec, cluster = drawn_on_measured(seed)
    there = spec.train.optimizer.model_copy(update={"offload": True})
    return spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": there})}), cluster


def drawn_in_part(seed: int) -> tuple[JobSpec, Cluster]:
    """Whose lower layers, and all MLPs but one, are frozen."""
    spec, cluster = drawn(seed)
    half = spec.model.layers // 2
    patterns = ("embedding", f"layers.0-{half - 1}", f"layers.{half}-{spec.model.layers - 1}.mlp")
    return spec.model_copy(update={"train": spec.train.model_copy(update={"frozen": patterns})}), cluster


def drawn_with_adapters(seed: int) -> tuple[JobSpec, Cluster]:
    """Which alone are trained."""
    spec, cluster = drawn_on_measured(seed)
    lora = LoraConfig(rank=8, targets=("q", "down"))
    return spec.model_copy(update={"train": spec.train.model_copy(update={"lora": lora})}), cluster


def corners(layouts: list[Candidate], spec: JobSpec) -> list[Candidate]:
    """Of each kind those with the fewest and the most micro-batches, and with as many as just fill the pipeline: where
    bounds are near to what they bound."""

    def count(each: Candidate) -> tuple[int, int]:
        return each.micro_batches(spec), each.ranks

    def filling(each: Candidate) -> tuple[int, int]:
        return abs(each.micro_batches(spec) - each.pipeline), each.ranks

    kinds: dict[tuple[object, ...], list[Candidate]] = {}
    for each in layouts:
        kind = each.schedule, each.pipeline, each.virtual_stages, each.recompute, bool(each.stage_layers), each.zero
        kind += each.context, each.method
        kinds.setdefault(kind, []).append(each)
    chosen = [(min(like, key=count), max(like, key=count), min(like, key=filling)) for like in kinds.values()]
    return [*dict.fromkeys(itertools.chain.from_iterable(chosen))]


BOUNDED = [(drawn, seed) for seed in range(6)] + [
    (drawn_on_cores, 1),
    (drawn_on_measured, 1),
    (drawn_on_measured, 4),
    (drawn_with_offload, 2),
    (drawn_in_part, 4),
    (drawn_with_adapters, 1),
]


@pytest.mark.parametrize(
    ("draw", "seed", "chosen"),
    [
        *((*each, corners) for each in BOUNDED),
        *(pytest.param(*each, lambda layouts, spec: layouts, marks=pytest.mark.soak) for each in BOUNDED),
    ],
)
def test_search_lower_bounds_never_exceed_the_step_time(draw, seed, chosen):
    spec, cluster = draw(seed)
    engine = engine_on(cluster.machine)
    bounds = Bounds(spec, cluster, engine)
    lists, any_of = [], random.Random(seed)
    for candidate in candidates(spec, cluster):
        lists += [candidate, *(each for _, each in bounds.with_min_seconds(candidate)[1:])]
        lists += candidate.sharded_further
        if candidate.data % 2 == 0 and any_of.random() < 0.1:
            split = candidate._replace(data=candidate.data // 2, context=2, method=any_of.choice(METHODS))
            lists += [split, *split.sharded_further]
        stages = candidate.pipeline * candidate.virtual_stages
        if 1 < stages < spec.model.layers and any_of.random() < 0.1:
            lists.append(candidate._replace(stage_layers=any_of.choice([*compositions(spec.model.layers, stages)])))
    for candidate in chosen(lists, spec):
        variant = candidate.spec(spec)
        if not find_problems(variant):
            assert bounds.min_bytes(candidate) <= worst_rank(variant, cluster.machine).total
            assert bounds.work_seconds(candidate) <= bounds.min_seconds(candidate)
            assert bounds.min_seconds(candidate) <= bounds.model(candidate).time().seconds * (1 + 1e-9)
            assert bounds.model(candidate).time() == StepModel(variant, cluster, engine).time()


def test_search_for_a_trillion_parameter_model_evaluates_few_layouts_closely(monkeypatch):
    spec, cluster = paper(128, 25600, 160, 3072), a100s(384)
    least, looked_at = Bounds._min_seconds, []
    monkeypatch.setattr(Bounds, "_min_seconds", lambda self, each: looked_at.append(each) or least(self, each))
    answer = search(spec, cluster)
    assert len(looked_at) < 1500  # of 3,000 that have room
    # The layout of arXiv:2104.04473, table 1, is as good as the best: what would make it better, micro-batches of two
    # under zb-v, does not fit with what the weights' halves of backward passes keep.
    published = next(plan for plan in answer.plans if sizes(plan.spec) == (8, 64, 6))
    assert published.time.seconds <= 1.03 * answer.plans[0].time.seconds


@pytest.mark.parametrize(
    ("shape", "nodes", "expected"), [((32, 20480, 128, 128), 8, (8, 8, 1)), ((105, 20480, 128, 280), 35, (8, 35, 1))]
)
def test_search_finds_the_layouts_that_papers_chose(shape, nodes, expected):
    """162B on 64 GPUs (arXiv:2104.04473, figure 13); 530B on 280 (arXiv:2205.05198, table 3)."""
    plan = search(paper(*shape), a100s(nodes), limit=1).plans[0]
    assert sizes(plan.spec) == expected


@pytest.mark.parametrize("draw", [drawn, drawn_on_cores])
def test_search_on_fewer_nodes_reuses_the_bounds_of_a_larger_one(draw):
    spec, cluster = draw(42)
    engine, fewer = engine_on(cluster.machine), replace(cluster, nodes=1)
    assert cluster.nodes > 1
    bounds = Bounds(spec, cluster, engine)
    for nodes in (cluster, fewer):
        left = [each for each in candidates(spec, nodes) if bounds.min_bytes(each) <= usable_bytes(nodes)]
        assert fastest(left, bounds, 5).plans() == search(spec, nodes, engine).plans


def test_search_gives_equal_results_for_equal_jobs_and_clusters():
    spec, cluster = drawn(11)
    assert search(spec, cluster) == search(spec, cluster)


@pytest.mark.parametrize(("nodes", "gpus_per_node"), [(3, 6), (1, 1), (1, 7), (13, 1), (5, 3)])
def test_search_on_odd_clusters_finds_valid_layouts(nodes, gpus_per_node):
    plans = search(job(heads=12, hidden=768), a100s(nodes, gpus_per_node)).plans
    assert plans
    for plan in plans:
        assert find_problems(plan.spec) == []
        layout = plan.spec.layout
        assert layout.pipeline * layout.data <= nodes * (gpus_per_node // layout.tensor)


def test_search_returns_plans_best_first_and_reasons_for_the_others():
    answer = search(paper(32, 20480, 128, 128), a100s(8))
    seconds = [plan.time.seconds for plan in answer.plans]
    assert seconds == sorted(seconds) and len(seconds) == 5
    reasons = {sizes(each.spec): each.reason for each in answer.rejected}
    assert "times the best" in " ".join(reasons.values())
    assert any(reason.startswith("does not fit: ") for reason in reasons.values())
    assert not {sizes(plan.spec)[:2] for plan in answer.plans} & {key[:2] for key in reasons}


def test_search_keeps_a_given_micro_batch_size():
    spec = job(train={"micro_batch_size": 3})
    assert {plan.spec.train.micro_batch_size for plan in search(spec, a100s()).plans} == {3}


def test_evaluation_of_a_given_layout_plans_it_or_says_why_it_is_rejected():
    spec = paper(32, 20480, 128, 128)
    given = spec.model_copy(update={"parallel": job(tensor=8, pipeline=8, recompute="full").layout})
    (plan,) = evaluate(given, a100s(8)).plans
    assert plan.time.seconds >= search(spec, a100s(8)).plans[0].time.seconds
    (rejected,) = evaluate(given, a100s(2)).rejected
    assert "needs 64 GPUs in groups of 8 on one node; 2 nodes of 8 have room for 2" in rejected.reason
    alone = spec.model_copy(update={"parallel": job(tensor=8).layout})
    assert evaluate(alone, a100s(8)).rejected[0].reason.startswith("does not fit: ")


def test_search_with_fp8_is_faster_and_refused_on_gpus_without_it():
    wide, narrow = (job(32, 4096, 32, train={"global_batch_size": 64, "fp8": fp8}) for fp8 in ("off", "rowwise"))
    hopper, ampere = (Cluster(machine_of(name), 1, 8) for name in ("h100", "a100"))
    (slow, *_), (quick, *_) = (search(each, hopper).plans for each in (wide, narrow))
    assert 0.5 * slow.time.seconds < quick.time.seconds < 0.9 * slow.time.seconds
    assert slow.peak_flops == quick.peak_flops, "an MFU is one of bf16"
    for answer in (search(narrow, ampere), evaluate(slow.spec.model_copy(update={"train": narrow.train}), ampere)):
        assert answer.plans == ()
        assert "a100-80gb has no 8-bit matmuls: set train.fp8: off" in answer.rejected[0].reason


def test_search_uses_the_memory_that_frozen_layers_free():
    """One device holds the model where next to nothing of it is trained."""
    spec = job(24, 2048, 16, train={"global_batch_size": 8, "frozen": FROZEN})
    cluster = a100s(1, 1)
    needed = worst_rank(search(spec, cluster).plans[0].spec).total
    device = replace(cluster.machine.accelerator, memory_bytes=1.1 * needed)
    small = replace(cluster, machine=replace(cluster.machine, accelerator=device))
    whole = worst_rank(search(job(24, 2048, 16, train={"global_batch_size": 8}), cluster).plans[0].spec)
    assert whole.total - whole.activations > 2 * needed
    assert search(spec, small).plans


def test_search_shards_gradients_and_weights_only_where_zero_1_does_not_fit():
    """A frozen base of 70 billion parameters on eight GPUs: 140 GB of weights on each under ZeRO 1 and 2."""
    model = {"family": "llama", "kv_heads": 8, "ffn_hidden_size": 28672, "sequence_length": 4096}
    train = {"frozen": ["embedding", "layers.0-78"], "global_batch_size": 64}
    plans = search(job(80, 8192, 64, model=model, train=train), a100s()).plans
    assert {(plan.spec.layout.pipeline, plan.spec.layout.zero) for plan in plans if plan.spec.layout.tensor == 1} == {
        (1, 3)
    }
    assert plans[0].spec.layout.zero == 3
    small = search(paper(8, 1024, 16, 64), a100s(), limit=50).plans
    assert {plan.spec.layout.zero for plan in small} == {1}


def test_zero_2_and_3_communicate_for_every_micro_batch():
    """On cores nothing hides it."""

    def seconds(zero: int, micro_batches: int) -> tuple[float, float]:
        train = {"global_batch_size": 4 * micro_batches, "micro_batch_size": 1, "precision": "fp32"}
        cluster = Cluster(cpu_machine(4, 4, 64e9), 1, 4)
        model = StepModel(job(24, 512, 8, train=train, data=4, zero=zero), cluster, engine_on(cluster.machine))
        return model.gradient_seconds(1.0), model.optimizer_seconds()

    once, update = seconds(1, 1)
    assert seconds(2, 1)[0] == pytest.approx(once, rel=0.05)  # unit by unit
    assert seconds(2, 8)[0] == pytest.approx(8 * seconds(2, 1)[0])
    assert seconds(3, 8)[0] == pytest.approx(8 * seconds(3, 1)[0])
    assert 2.3 < seconds(3, 1)[0] / once < 3.0, "layers that are still there are not gathered again"
    assert seconds(3, 1)[1] < seconds(2, 1)[1] == pytest.approx(update), "nothing is gathered after the update"


@pytest.mark.parametrize(("slots", "cores"), [(16, 4), (2, 8), (8, 1)])
def test_mfu_on_cores_is_of_the_threads_that_the_ranks_of_a_layout_have(slots, cores):
    """As a job reports it: however many slots a node has that a layout leaves free."""
    cluster = Cluster(cpu_machine(slots, cores, 64e9), 1, slots)
    plans = search(job(2, 1024, 4), cluster, engine_on(cluster.machine)).plans
    assert 0.3 < max(plan.rate(plan.flops.model_full) / plan.peak_flops for plan in plans) <= 1.0
    assert min(plan.spec.layout.world_size for plan in plans) < 16


def test_search_reports_only_layouts_that_the_rules_allow():
    """512 tokens cannot be split over 3 or 6 ranks, which sequence parallelism would do."""
    answer = search(job(4, 768, 12), a100s(1, 6))
    reported = [plan.spec for plan in answer.plans] + [each.spec for each in answer.rejected]
    assert {spec.layout.tensor for spec in reported} == {1, 2, 4}
    assert not any(map(find_problems, reported))


@pytest.mark.parametrize("elastic", [{"max_data": 48}, {"max_data": 48, "min_data": 40}, {"min_data": 200}])
def test_large_searches_try_up_to_the_most_replicas_elastic_allows(elastic):
    spec, cluster = job(24, train={"global_batch_size": 512}), a100s(32)
    assert not is_complete(spec, cluster)
    limited = spec.model_copy(update={"elastic": ElasticConfig(**elastic)})
    sizes = {each.data for each in candidates(limited, cluster)}
    assert max(sizes) == elastic.get("max_data", 256) and min(sizes) >= elastic.get("min_data", 1)


@pytest.mark.parametrize(
    ("train", "most"),
    [
        ({"batch_ramp": {"start": 24, "increment": 8, "samples": 1000}}, 24),
        ({"deterministic": "elastic", "micro_batch_size": 5}, 103),
    ],
)
def test_large_searches_try_up_to_the_most_replicas_batches_allow(train, most):
    """Those of a ramp begin smaller, and for elastic sums micro-batches are not split between replicas."""
    found = {each.data for each in candidates(job(24, train={"global_batch_size": 512, **train}), a100s(32))}
    assert max(found) == most


@pytest.mark.parametrize(
    ("train", "most"), [({}, 255), ({"micro_batch_size": 3}, 85), ({"deterministic": "elastic"}, 256)]
)
def test_layouts_for_cuda_graphs_have_enough_micro_batches_in_large_searches_too(train, most):
    spec = job(24, train={"global_batch_size": 512, "cuda_graphs": True, **train})
    found = list(candidates(spec, a100s(32)))
    assert {(each.tensor, each.pipeline) for each in found} == {(1, 1)}
    assert max(each.data for each in found) == most
    assert search(spec, a100s(32), limit=1).plans


def test_search_names_the_rule_that_leaves_no_layout():
    limited = job(train={"global_batch_size": 3}).model_copy(update={"elastic": ElasticConfig(max_data=4)})
    (rejected,) = search(limited, a100s()).rejected
    assert rejected.reason.startswith("elastic.max_data: 4 replicas do not work: a batch of 3 has no samples")
    wide = job().model_copy(update={"elastic": ElasticConfig(min_data=9)})
    (rejected,) = search(wide, a100s()).rejected
    assert "has room for 8 such groups, not 9" in rejected.reason
    assert (smallest_cluster(wide, a100s()) or "").startswith("2 nodes of 8 ")
    assert smallest_cluster(limited, a100s()) is None


def test_search_suggests_no_cluster_for_a_micro_batch_that_fits_on_none():
    """The logits of 16,384 sequences fit on no such GPU; those of one do."""
    given = job(train={"global_batch_size": 2**21, "micro_batch_size": 16384})
    answer = search(given, a100s(1, 1))
    assert answer.plans == () and "does not fit" in answer.rejected[0].reason
    assert smallest_cluster(given, a100s(1, 1)) is None


@pytest.mark.parametrize(
    ("length", "sizes"), [(2048, [1, 2, 4, 8, 16, 32, 64]), (256, [1, 2, 4, 8, 16, 32, 64, 128, 256])]
)
def test_search_tries_larger_micro_batches_for_short_sequences(length, sizes):
    spec = job(2, 64, 4, model={"sequence_length": length, "vocabulary_size": 512})
    assert micro_batch_sizes(spec, 256) == sizes


def test_search_keeps_both_of_two_equally_fast_schedules_despite_rounding():
    best, plain = Best(1, float("inf"), 4), Candidate(2, 1, 4, 1, "1f1b", 1, "none")
    for candidate, seconds in ((plain, 0.30076384464983213), (plain._replace(schedule="zb-h1"), 0.3007638446498321)):
        best.add(candidate, SimpleNamespace(time=SimpleNamespace(seconds=seconds)))
    assert [candidate for _, candidate in best.found()] == [plain, plain._replace(schedule="zb-h1")]
