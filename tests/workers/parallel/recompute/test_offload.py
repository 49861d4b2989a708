"""Activations that wait in host memory: the bits of those that wait on the device, whatever else is chosen; what is
copied, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import axes, document, spec
from one_layer import held_bytes, lone_rank
from plain_gpt import random_weights
from plain_llama import plain_model
from rank_programs import light, micro_batches, run_steps_offloaded
from torch.utils._python_dispatch import _disable_current_modes

from manta.workers.accounting.activation_bytes import chunk_bytes, offloaded, saved_terms
from manta.workers.engine import Engine
from manta.workers.parallel import recompute
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute import Recompute, offload
from manta.workers.spec.reading import parse_job_spec

WINDOWS = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(3))
ALL_MODULES = ["core_attention", "norm", "mlp_activation"]
JOBS: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "alone": ((1, 1, 1), {}, {}, {}),
    "llama": ((1, 1, 1), {}, {"family": "llama", "kv_heads": 2, "sliding_window": 5}, {}),
    "selective": ((1, 1, 1), {"recompute": "selective", "recompute_modules": ALL_MODULES}, {}, {}),
    "explicit": ((1, 1, 1), {"recompute": "selective", "recompute_modules": ALL_MODULES}, {"dropout": 0.1}, {}),
    "qwen, tensor": ((2, 1, 1), {}, {"family": "qwen", "kv_heads": 2, "head_dim": 6}, {}),
    "1f1b": ((1, 2, 1), {}, {}, {}),
    "full, tensor": ((2, 2, 1), {"recompute": "full", "recompute_every": 2}, {}, {}),
    "gpipe, dropout": ((1, 2, 1), {"schedule": "gpipe"}, {"dropout": 0.1}, {}),
    "interleaved": ((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2}, {"family": "llama"}, {}),
    "zb-h1": ((1, 2, 1), {"schedule": "zb-h1", "recompute": "selective", "recompute_keep": 1}, {}, {}),
    "zb-v": ((1, 2, 1), {"schedule": "zb-v", "virtual_stages": 2}, {}, {"deterministic": "elastic"}),
    "frozen, a few logits": ((1, 2, 1), {}, {}, {"frozen": ["embedding", "layers.0-1"], "head_tokens": 5}),
}


def job(name: str, layers: int) -> dict[str, Any]:
    """Two steps."""
    layout, parallel, model, train = JOBS[name]
    return document(
        model={"layers": 6, "hidden_size": 16, "vocabulary_size": 257, "heads": 4} | model,
        train={"steps": 2, "micro_batch_size": 2} | train,
        parallel=axes(layout) | {"offload_layers": layers} | parallel,
    )


@pytest.mark.parametrize("name", JOBS)
def test_offloaded_activations_give_the_bits_of_kept_ones(ranks, name):
    """With none, one or some, and all of the layers' activations on the host."""
    jobs = [job(name, layers) for layers in (0, 1 + list(JOBS).index(name) % 2, 6)]
    job_spec = parse_job_spec(jobs[0])
    weights = light(random_weights(job_spec, spread=0.1, model=plain_model(job_spec)))
    batches = [[WINDOWS, WINDOWS.flip(0)] for _ in jobs]
    given = jobs, [weights for _ in jobs], batches, torch.float32
    for plain, *others in ranks.run(job_spec.layout, run_steps_offloaded, *given):
        for each in others:
            assert (each.losses, each.grad_norms) == (plain.losses, plain.grad_norms)
            for kind in ("gradients", "parameters"):
                for (_, _, actual), (_, _, expected) in zip(getattr(each, kind), getattr(plain, kind), strict=True):
                    assert torch.equal(actual, expected)


def one_rank(**parallel: Any) -> Engine:
    """Of a small Llama, with weights."""
    job_spec = spec(
        model={"layers": 4, "hidden_size": 16, "family": "llama", "kv_heads": 2, "sliding_window": 5},
        train={"micro_batch_size": 2},
        parallel={"offload_layers": 2, **parallel},
    )
    engine = Engine(job_spec, lone_rank(job_spec))
    engine.initialise(1)
    return engine


class Recorded(offload.HostBlocks):
    """Notes what is copied to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[torch.Tensor] = []

    def acquire(self, like: torch.Tensor) -> torch.Tensor:
        """As the others do."""
        self.copied.append(like)
        return super().acquire(like)


def forward(engine: Engine, recompute: Recompute) -> torch.Tensor:
    """Logits of a micro-batch."""
    batch = micro_batches(engine.spec, 0, WINDOWS)
    run = ForwardPass(engine.pipeline.positions, recompute=recompute)
    logits: torch.Tensor = engine.model.chunks[0](batch[0].inputs_sb, run)
    return logits


@pytest.mark.parametrize(
    "parallel",
    [{}, {"recompute": "full"}, {"recompute": "selective", "recompute_modules": ALL_MODULES}],
    ids=str,
)
def test_offload_copies_each_saved_activation_once_and_no_parameters_or_tables(monkeypatch, parallel):
    """As many bytes as arithmetic says, of no parameter and of no table; and as many leave the device."""
    monkeypatch.setattr(recompute, "OFFLOADED_BYTES", 0)
    engine, host = one_rank(**parallel), Recorded()
    policy_of = Recompute.of(engine.spec.layout)
    forward(engine, policy_of)  # tables are made
    engine.model.chunks[0].shared.host_blocks = host
    kept = forward(engine, policy_of)
    assert kept.requires_grad
    layout = engine.spec.layout
    terms = [saved_terms(engine.spec, layer, layout.recompute) for layer in range(4)]
    expected = sum(sum(offloaded(engine.spec, 0, place, each)) for place, each in enumerate(terms))
    assert sum(each.nbytes for each in host.copied) == expected
    stay = {offload.memory_of(each) for each in (engine.flat.parameters, *engine.model.chunks[0].shared.all_tables())}
    assert not stay & {offload.memory_of(each) for each in host.copied}


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
def test_fp8_training_has_the_same_bits_with_offloaded_activations(monkeypatch, fp8):
    monkeypatch.setattr(recompute, "OFFLOADED_BYTES", 0)
    results = []
    for layers in (0, 3):
        train = {"micro_batch_size": 2, "precision": "bf16", "fp8": fp8, "head_tokens": 5}
        model = {"layers": 4, "sequence_length": 16, "hidden_size": 64}
        job_spec = spec(model=model, train=train, parallel={"offload_layers": layers})
        engine = Engine(job_spec, lone_rank(job_spec))
        engine.initialise(1)
        batch = micro_batches(job_spec, 0, WINDOWS.repeat(1, 2)[:, :17])
        losses = [engine.step(batch, len(WINDOWS), 1e-3, 0).loss for _ in range(2)]
        results.append((losses, engine.flat.gradients.clone()))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def uncounted(size: int, pinned: bool) -> torch.Tensor:
    """Memory that `held_bytes` does not see."""
    with _disable_current_modes():
        return torch.empty(size, dtype=torch.uint8)


def test_device_memory_shrinks_by_the_offloaded_activations(monkeypatch):
    monkeypatch.setattr(recompute, "OFFLOADED_BYTES", 0)
    monkeypatch.setattr(offload, "host_memory", uncounted)
    held = []
    for layers in (0, 2):
        engine = one_rank(offload_layers=layers)
        forward(engine, Recompute())
        held.append(
            held_bytes(lambda engine=engine: forward(engine, Recompute()))[0] - chunk_bytes(engine.spec, 0, False)
        )
    assert held[0] == held[1] < 0, "the cross-entropy is not there"


def test_small_tensors_stay():
    engine, host = one_rank(), Recorded()
    engine.model.chunks[0].shared.host_blocks = host
    forward(engine, Recompute())
    assert host.copied == []


def test_offload_copies_nothing_without_gradients(monkeypatch):
    monkeypatch.setattr(recompute, "OFFLOADED_BYTES", 0)
    host, engine = Recorded(), one_rank()
    engine.model.chunks[0].shared.host_blocks = host
    with torch.no_grad():
        forward(engine, Recompute())
    engine.pipeline.evaluate(micro_batches(engine.spec, 0, WINDOWS))
    assert host.copied == []


def test_offloaded_activations_return_one_layer_ahead_of_backward(monkeypatch):
    """Beside the backward of the layer behind it, and both of those that come first at once."""
    monkeypatch.setattr(recompute, "OFFLOADED_BYTES", 0)
    engine, order = one_rank(offload_layers=3), []
    chunk = engine.model.chunks[0]
    for name, layer in chunk.layers.items():
        layer.register_full_backward_hook(lambda *_, name=name: order.append(f"layer {name}"))
    fetch, made = offload.OffloadedLayer.fetch, {}

    def noted(layer: offload.OffloadedLayer) -> None:
        if not layer._on_device:
            order.append(f"fetch {made.setdefault(layer, 2 - len(made))}")
        fetch(layer)

    monkeypatch.setattr(offload.OffloadedLayer, "fetch", noted)
    forward(engine, Recompute()).sum().backward()
    assert order == ["fetch 2", "layer 3", "fetch 1", "layer 2", "fetch 0", "layer 1", "layer 0"]


def test_host_memory_is_used_again_and_after_a_backward_that_broke_off_too(monkeypatch):
    monkeypatch.setattr(recompute, "OFFLOADED_BYTES", 0)
    made = []

    def noted(size: int, pinned: bool) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(offload, "host_memory", noted)
    engine = one_rank()
    forward(engine, Recompute()).sum().backward()
    count = len(made)
    forward(engine, Recompute()).sum().backward()
    forward(engine, Recompute())  # and nobody asks for its gradient
    both = forward(engine, Recompute()), forward(engine, Recompute())
    assert count < len(made) == 2 * count
    del both


def test_offload_copies_shared_storage_once_and_restores_its_views(monkeypatch):
    monkeypatch.setattr(recompute, "OFFLOADED_BYTES", 0)
    host = Recorded()
    layer, whole = offload.OffloadedLayer(host, ()), torch.arange(24.0).view(4, 6)
    views = [whole, whole[1:, ::2], whole.t(), whole[2]]
    held = [layer.pack(each) for each in views]
    expected = [each.clone() for each in views]
    layer.start_copy_to_host()
    layer.release()
    whole.zero_()
    assert len(host.copied) == 1 and layer.pack(whole.new_ones(100)[:10]).shape == (10,), "most of it is not kept"
    for saved, before in zip(held, expected, strict=True):
        assert torch.equal(layer.unpack(saved), before)
        assert layer.unpack(saved).stride() == (saved.stride if isinstance(saved, offload._Saved) else before.stride())
