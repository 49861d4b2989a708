"""Compiled blocks compute what the others do; the layers of a stage share one compilation, and collectives stay
outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import axes, document, layout_of, spec

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine
from manta.workers.model.layer import Layer
from manta.workers.model.stage import compile_layers
from manta.workers.parallel.pipeline import runtime
from manta.workers.parallel.recompute import offload
from manta.workers.parallel.tensor.cross_entropy import BY_BLOCKS, LossKernels
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.sequence_runs import runs_of


def batch(job: JobSpec, context: int) -> list[MicroBatch]:
    """Two micro-batches of the whole global batch, as context rank `context` has them."""
    shape = (job.model.sequence_length + 1, 4)
    tokens = torch.randint(256, (2, *shape), generator=torch.Generator().manual_seed(3))
    whole = [MicroBatch(range(4 * i, 4 * i + 4), part[:-1], part[1:]) for i, part in enumerate(tokens)]
    return [each.part(runs_of(job.layout, job.model.sequence_length, context)) for each in whole]


def train(engine: Engine, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    engine.initialise(1)
    statistics = [engine.step(batch(engine.spec, engine.comm.index("context")), 8, 1e-3, 0) for _ in range(steps)]
    return [(each.loss, each.grad_norm) for each in statistics]


def compiled(comm: Comm, job: dict, steps: int) -> tuple[list[tuple[float, float]], int, int]:
    """Train with compiled blocks: numbers of each step, graphs compiled, graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = Engine(parse_job_spec(job), comm)
    compile_layers(engine.model, backend="aot_eager")
    numbers = train(engine, steps)
    counters = torch._dynamo.utils.counters
    return numbers, counters["stats"]["unique_graphs"], len(counters["graph_break"])


def plain(comm: Comm, job: dict, steps: int) -> list[tuple[float, float]]:
    """Train with blocks as they are."""
    return train(Engine(parse_job_spec(job), comm), steps)


@pytest.mark.parametrize(
    ("family", "tensor", "kv_heads", "recompute", "chunks", "lora"),
    [
        *(
            ("gpt", 2, 4, "selective", 3, None),
            ("qwen", 2, 2, "none", 1, None),
            ("llama", 2, 1, "full", 2, {"rank": 3}),
            ("deepseek", 2, None, "none", 1, None),
        ),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                *(("gpt", 1, 4, "none", 1, None), ("gpt", 2, 1, "none", 1, None), ("gpt", 2, 4, "full", 2, None)),
                *(("llama", 1, 4, "selective", 1, None), ("qwen", 2, 2, "none", 3, None)),
                ("gpt", 1, 4, "none", 1, {"rank": 3, "targets": ["k", "o"]}),
            )
        ),
    ],
)
def test_compiled_layers_are_one_graph_and_give_the_same_numbers(
    ranks, family, tensor, kv_heads, recompute, chunks, lora
):
    latent = {"q_rank": 12, "kv_rank": 8, "rope_size": 4, "nope_size": 6, "value_size": 8}
    model = {"latent_attention": latent} if family == "deepseek" else {"kv_heads": kv_heads}
    job = document(
        model={"family": family, "layers": 5, "sliding_window": 5, **model},
        train={"micro_batch_size": 4, "lora": lora},
        parallel={**axes((tensor, 1, 1)), "recompute": recompute, "forward_chunks": chunks},
    )
    expected = ranks.run(layout_of(tensor=tensor), plain, job, 3)
    for rank, (numbers, graphs, breaks) in enumerate(ranks.run(layout_of(tensor=tensor), compiled, job, 3)):
        assert numbers == [pytest.approx(each, rel=1e-6) for each in expected[rank]]
        assert (graphs, breaks) == (1, 0)


@pytest.mark.parametrize("method", ["all_gather", "all_to_all"])
def test_attention_across_ranks_stays_out_of_compiled_layers(ranks, method):
    layout = {"context": 2, "context_method": method}
    job = document(model={"family": "llama", "layers": 6, "sliding_window": 5}, train={"micro_batch_size": 4})
    job["parallel"] = layout
    expected = ranks.run(ParallelConfig(**layout), plain, job, 2)
    for rank, (numbers, graphs, _) in enumerate(ranks.run(ParallelConfig(**layout), compiled, job, 2)):
        assert numbers == [pytest.approx(each, rel=1e-6) for each in expected[rank]]
        assert graphs <= 5, "equal layers share what is before and after"


def test_layers_with_8_bit_products_are_one_graph_too(ranks):
    job = document(
        model={"family": "llama", "layers": 3, "hidden_size": 64, "kv_heads": 2, "sequence_length": 16},
        train={"micro_batch_size": 4, "precision": "bf16", "fp8": "rowwise"},
        parallel=axes((2, 1, 1)),
    )
    expected = ranks.run(layout_of(tensor=2), plain, job, 3)
    for rank, (numbers, graphs, breaks) in enumerate(ranks.run(layout_of(tensor=2), compiled, job, 3)):
        assert numbers == [pytest.approx(each, rel=5e-3) for each in expected[rank]]
        assert (graphs, breaks) == (1, 0)


def test_compiled_layers_whose_weights_share_memory_are_one_graph(ranks):
    """Their products find the layer whose weights are there."""
    job = document(
        model={"family": "llama", "layers": 5, "kv_heads": 2},
        train={"micro_batch_size": 4},
        parallel={**axes((1, 1, 2)), "zero": 3, "recompute": "full"},
    )
    whole = job | {"parallel": job["parallel"] | {"zero": 1}}
    expected = ranks.run(layout_of(data=2), plain, whole, 3)
    for rank, (numbers, graphs, breaks) in enumerate(ranks.run(layout_of(data=2), compiled, job, 3)):
        assert numbers == [pytest.approx(each, rel=1e-6) for each in expected[rank]]
        assert (graphs, breaks) == (1, 0)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_job_that_asks_for_it_has_each_layer_compiled_by_the_default_compiler(monkeypatch, wanted):
    given = []
    monkeypatch.setattr(Layer, "compile", lambda layer, backend: given.append((layer, backend)))
    job = spec(model={"layers": 3}, train={"compile": wanted})
    engine = Engine(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")))
    (chunk,) = engine.model.chunks
    assert given == [(layer, "inductor") for layer in chunk.layers.values() if wanted]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_of_compiled_layers_can_wait_in_host_memory(monkeypatch, recompute):
    """With one graph, and the same numbers."""
    monkeypatch.setattr("manta.workers.parallel.recompute.OFFLOADED_BYTES", 0)
    taken, take, results = [], offload.HostBlocks.acquire, []
    monkeypatch.setattr(offload.HostBlocks, "acquire", lambda host, like: taken.append(like.shape) or take(host, like))
    comm = Comm(RankGrid(spec().layout), 0, torch.device("cpu"))
    for layers in (0, 3):
        layout = {"recompute": recompute, "offload_layers": layers}
        job = document(model={"layers": 4}, train={"micro_batch_size": 4}, parallel=layout)
        results.append(compiled(comm, job, 3))
        assert (len(taken) > 0) == (layers > 0)
    assert results[0] == results[1] and results[0][1:] == (1, 0)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize(("z_loss", "head_tokens"), [(0.0, 0), (1e-4, 0), (0.0, 5)])
def test_the_loss_of_a_compiled_job_is_compiled(monkeypatch, wanted, z_loss, head_tokens):
    called: list[str] = []

    def noting(name: str, real: Any) -> Any:
        return lambda *given: called.append(name) or real(*given)

    fused = LossKernels(
        noting("sums", BY_BLOCKS.sums),
        noting("exponentials", BY_BLOCKS.exponentials),
        noting("scaled", BY_BLOCKS.scaled),
    )
    monkeypatch.setattr(Layer, "compile", lambda layer, backend: None)
    monkeypatch.setattr(runtime, "compiled_kernels", lambda: fused)
    job = spec(
        model={"layers": 1},
        train={"compile": wanted, "precision": "bf16", "z_loss": z_loss, "head_tokens": head_tokens},
    )
    train(Engine(job, Comm(RankGrid(job.layout), 0, torch.device("cpu"))), 1)
    assert set(called) == ({"sums", "exponentials", "scaled"} if wanted else set())


@pytest.mark.soak
def test_16_bits_compiled_are_the_same_ones_each_time_and_near_those_of_plain_torch():
    comm = Comm(RankGrid(spec().layout), 0, torch.device("cpu"))
    plain_one, first, second = (
        train(Engine(spec(model={"layers": 3}, train={"precision": "bf16", "compile": each}), comm), 3)
        for each in (False, True, True)
    )
    assert first == second
    assert first == [pytest.approx(each, rel=5e-3) for each in plain_one]  # fused operations round less


@pytest.mark.soak  # its C++ takes a minute to compile
def test_products_for_weights_may_be_put_off():
    comm = Comm(RankGrid(spec().layout), 0, torch.device("cpu"))
    model, parallel = {"family": "llama", "layers": 3}, {"schedule": "zb-h1"}
    plain_one, compiled_one = (
        train(Engine(spec(model=model, train={"micro_batch_size": 4, "compile": each}, parallel=parallel), comm), 3)
        for each in (False, True)
    )
    assert compiled_one == [pytest.approx(each, rel=1e-5) for each in plain_one]


@pytest.mark.soak  # its C++ takes a minute to compile
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_compiled_fp8_steps_follow_the_losses_of_eager_ones(kind):
    comm = Comm(RankGrid(spec().layout), 0, torch.device("cpu"))
    shape = {"layers": 2, "hidden_size": 64, "sequence_length": 16}
    plain_one, compiled_one = (
        train(Engine(spec(model=shape, train={"precision": "bf16", "fp8": kind, "compile": each}), comm), 3)
        for each in (False, True)
    )
    assert compiled_one == [pytest.approx(each, rel=5e-3) for each in plain_one]


@pytest.mark.soak  # its C++ takes twenty seconds to compile
def test_the_default_compiler_gives_the_same_numbers():
    job = spec(model={"layers": 3}, train={"micro_batch_size": 4, "compile": True})
    comm = Comm(RankGrid(job.layout), 0, torch.device("cpu"))
    expected = train(Engine(spec(model={"layers": 3}, train={"micro_batch_size": 4}), comm), 3)
    assert train(Engine(job, comm), 3) == [pytest.approx(each, rel=1e-5) for each in expected]
