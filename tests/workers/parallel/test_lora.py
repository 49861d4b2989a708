"""Adapters train as those of PEFT do, beside the weights of one folder; they begin as their base, and their initial
values depend on names alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_specs import axes, document, layout_of, spec
from one_layer import lone_rank
from rank_programs import assemble, default_dtype, initial_parameters, micro_batches
from their_models import in_fp64, saved

from manta.workers.config import JobSpec
from manta.workers.engine import Engine
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.submitted import with_shape_of_weights
from manta.workers.weights.reading import Weights

LENGTH, STEPS, RATE = 8, 20, 1e-2
LLAMA = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
# PEFT has one adapter for GPT-2's queries, keys and values together, where each of ours has its own.
GPT2 = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
OURS = {"q": "attention.q", "k": "attention.k", "v": "attention.v", "o": "attention.output"}


def adapters_of(model: torch.nn.Module, modules: dict[str, str]) -> dict[str, torch.nn.Parameter]:
    """PEFT's parameters by our names."""
    targets, found = {theirs: target for target, theirs in modules.items()}, {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _, _, path = name.partition(".layers." if ".layers." in name else ".h.")
            number, inner = path.split(".", 1)
            theirs, _, end = inner.partition(".lora_")
            ours = OURS.get(targets[theirs], f"mlp.{targets[theirs]}")
            found[f"layers.{number}.{ours}.lora_{end[0].lower()}"] = parameter
    return found


def begun(job: JobSpec) -> Engine:
    """One rank in fp64, with the weights of its folder."""
    engine = Engine(job, lone_rank(job), torch.float64)
    engine.begin_with(Weights(job).fill)
    return engine


@pytest.mark.parametrize(
    ("kind", "modules", "scaling"), [("llama", LLAMA, "standard"), ("qwen3", LLAMA, "root"), ("gpt2", GPT2, "standard")]
)
def test_adapters_take_twenty_steps_as_those_of_peft(tmp_path: Path, kind, modules, scaling):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = saved(kind, tmp_path / "base")
    lora = {"rank": 4, "alpha": 20.0, "targets": list(modules), "scaling": scaling}
    job = parse_job_spec(
        with_shape_of_weights(
            {
                "model": {"from": str(folder), "sequence_length": LENGTH},
                "data": {"source": "python-stdlib"},
                "train": {"steps": STEPS, "global_batch_size": 4, "lora": lora, "optimizer": {"clip_norm": 0.0}},
            }
        )
    )
    config = peft.LoraConfig(
        r=4, lora_alpha=20.0, target_modules=list(modules.values()), use_rslora=scaling == "root",
        fan_in_fan_out=kind == "gpt2", task_type="CAUSAL_LM",
    )  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    theirs = peft.get_peft_model(in_fp64(base, job), config).double()
    adapters, optimizer = adapters_of(theirs, modules), job.train.optimizer
    with default_dtype(torch.float64):
        engine = begun(job)
        slots = {slot.entry.name: slot for slot in engine.flat.slots}
        assert slots.keys() == adapters.keys()
        for name, parameter in adapters.items():
            parameter.data.copy_(slots[name].entry.parameter)
        reference = torch.optim.AdamW(
            adapters.values(), RATE, (optimizer.beta1, optimizer.beta2), optimizer.epsilon, optimizer.weight_decay
        )
        for step in range(1, STEPS + 1):
            windows = torch.randint(256, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            statistics = engine.step(micro_batches(job, 0, windows), 4, RATE, 0)
            reference.zero_grad()
            logits = theirs(windows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            loss.backward()
            reference.step()
            assert statistics.loss == pytest.approx(loss.item(), rel=1e-8), step
            for name, parameter in adapters.items():
                ours = engine.flat.gradients[slots[name].start : slots[name].end].view(parameter.shape)
                assert (ours - parameter.grad).norm() <= 1e-8 * statistics.grad_norm, (step, name)
    assert all((parameter.grad != 0).any() for parameter in adapters.values())


def test_a_model_with_new_adapters_has_the_bits_of_its_base():
    def outcome(**lora: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        job = spec(model={"family": "qwen", "kv_heads": 2}, train={"lora": lora or None})
        engine = Engine(job, lone_rank(job))
        engine.initialise(5)
        windows = torch.randint(256, (8, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        losses_m, _ = engine.pipeline.evaluate(micro_batches(job, 0, windows))
        parts = [slot.entry for slot in (*engine.flat.slots, *engine.flat.frozen)]
        own = {entry.name: entry.parameter for entry in parts}
        return losses_m.tolist(), own

    (base, weights), (adapted, own), (other, gaussian) = outcome(), outcome(rank=3), outcome(rank=3, init="gaussian")
    assert adapted == base == other
    assert all(torch.equal(own[name], weight) for name, weight in weights.items())
    a, b = own["layers.1.mlp.down.lora_a"], own["layers.1.mlp.down.lora_b"]
    bound = a.shape[1] ** -0.5
    assert 0.9 * bound < a.abs().max() <= bound and not b.any()
    assert gaussian["layers.1.mlp.down.lora_a"].std().item() == pytest.approx(1 / 3, rel=0.2)


@pytest.mark.parametrize("layout", [(4, 1, 1), (2, 2, 2)], ids=str)
def test_adapters_of_every_layout_start_from_the_same_bits(ranks, layout):
    def initial(sizes: tuple[int, int, int]) -> dict[str, torch.Tensor]:
        shape = {"family": "llama", "kv_heads": 2}
        job = document(model=shape, train={"lora": {"rank": 3}}, parallel=axes(sizes))
        by_rank = ranks.run(layout_of(*sizes), initial_parameters, job)
        return assemble(parameters, [placed for rank in by_rank for placed in rank])

    alone = spec(model={"family": "llama", "kv_heads": 2}, train={"lora": {"rank": 3}})
    engine = Engine(alone, lone_rank(alone))
    parameters = {slot.entry.name: slot.entry.parameter for slot in engine.flat.slots}
    one, other = initial((1, 1, 1)), initial(layout)
    assert all(torch.equal(one[name], other[name]) for name in parameters)
