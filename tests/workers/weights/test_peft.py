"""Low-rank adapters go to PEFT and come from there, and merged weights to `transformers`, with the same logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint_programs import save, trainer_of
from engine_specs import axes
from safetensors.torch import load_file, save_file
from their_models import saved, their_model

from manta.workers import evaluate, generate
from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.errors import WeightsError
from manta.workers.inference.loaded_model import LoadedModel
from manta.workers.protocol.messages import Resume
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.submitted import with_shape_of_weights
from manta.workers.weights.companions import byte_tokenizer
from manta.workers.weights.export import export
from manta.workers.weights.folder import ADAPTER

peft = pytest.importorskip("peft")
LENGTH, RANK = 8, 3
FAMILIES = ["llama", "qwen3", "mixtral", "gpt2"]
TOKENS = torch.tensor([[5, 200, 17, 17, 99, 3, 260, 42], [1, 2, 3, 4, 5, 6, 7, 8]])
CPU = torch.device("cpu")


def job(base: Path, corpus: str, layout: tuple[int, int, int] = (1, 1, 1), **lora: Any) -> dict[str, Any]:
    lora = {"rank": RANK, "alpha": 5.0, **lora}
    return with_shape_of_weights(
        {
            "model": {"from": str(base), "sequence_length": LENGTH},
            "data": {"source": "text", "paths": [corpus]},
            "train": {"steps": 3, "global_batch_size": 8, "lora": lora, "optimizer": {"learning_rate": 0.1}},
            "parallel": axes(layout),
        }
    )


def train_and_save(comm: Comm, document: dict[str, Any], folder: str, steps: int = 2) -> None:
    trainer = trainer_of(comm, document, folder)
    trainer.restore(Resume())
    for _ in range(steps):
        trainer.train_step()
    save(trainer)
    comm.barrier()
    trainer.close()


def begun(document: dict[str, Any], folder: Path, steps: int = 0) -> Path:
    """The checkpoint of a job of one rank after so many steps."""
    train_and_save(Comm(RankGrid(parse_job_spec(document).layout), 0, CPU), document, str(folder), steps)
    return complete_checkpoints(folder)[-1][0]


def logits_of(model: torch.nn.Module, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model.double()(tokens).logits


def our_logits(checkpoint: Path) -> torch.Tensor:
    return LoadedModel.of_checkpoint(checkpoint, CPU, torch.float64)[0].logits(TOKENS)


def with_peft(kind: str, folder: Path) -> torch.nn.Module:
    return peft.PeftModel.from_pretrained(their_model(kind), folder).eval()


def made_by_peft(kind: str, folder: Path, **config: Any) -> torch.nn.Module:
    """An adapter whose B is not zero, saved there."""
    beside_experts = [f"{name}_proj" for name in "qkvo"]
    known = {"gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"], "mixtral": beside_experts}
    targets = known.get(kind, "all-linear")
    config = {"r": RANK, "lora_alpha": 5, "target_modules": targets, "fan_in_fan_out": kind == "gpt2", **config}
    made, generator = (
        peft.get_peft_model(their_model(kind), peft.LoraConfig(**config)),
        torch.Generator().manual_seed(3),
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    made.save_pretrained(folder)
    return made.eval()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.parametrize(
    ("kind", "layout", "lora"),
    [
        ("llama", (2, 2, 1), {}),
        ("qwen3", (1, 2, 2), {"scaling": "root", "targets": ["v", "o", "down"]}),
        ("gpt2", (2, 1, 2), {}),
        ("gpt2", (1, 1, 1), {"targets": ["q", "v"]}),
        ("gpt2", (1, 1, 1), {"targets": ["k", "up"], "scaling": "root"}),
        ("gpt2", (1, 1, 1), {"targets": ["q", "v", "o"], "scaling": "root"}),
    ],
    ids=str,
)
def test_adapters_and_merged_weights_have_the_same_logits_elsewhere(kind, layout, lora, ranks, corpus, tmp_path):
    document = job(saved(kind, tmp_path / "base"), corpus, layout, **lora)
    ranks.run(parse_job_spec(document).layout, train_and_save, document, str(tmp_path / "job"))
    checkpoint = complete_checkpoints(tmp_path / "job")[-1][0]
    ours, base = our_logits(checkpoint), logits_of(their_model(kind))
    assert (ours - base).abs().max() > 0.05, "it has learned something"
    done = export(str(checkpoint), tmp_path / "adapter", "adapter")
    assert_close(ours, logits_of(with_peft(kind, tmp_path / "adapter")))
    assert done.bytes <= (tmp_path / "adapter" / ADAPTER).stat().st_size < done.bytes + 10_000
    merged = export(str(checkpoint), tmp_path / "merged")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert_close(ours, logits_of(theirs))
    assert merged.rounding == 0.0
    again = LoadedModel.of_weights(parse_job_spec(document), CPU, adapter=tmp_path / "adapter")
    assert_close(again.logits(TOKENS), ours)


@pytest.mark.parametrize("kind", FAMILIES)
def test_adapter_of_peft_is_where_training_begins_and_what_is_exported_again(kind, corpus, tmp_path):
    base, theirs = saved(kind, tmp_path / "base"), made_by_peft(kind, tmp_path / "adapter")
    checkpoint = begun(job(base, corpus, **{"from": str(tmp_path / "adapter")}), tmp_path / "job")
    assert_close(our_logits(checkpoint), logits_of(theirs))
    export(str(checkpoint), tmp_path / "again", "adapter")
    assert_close(logits_of(with_peft(kind, tmp_path / "again")), logits_of(theirs))
    before, after = (load_file(tmp_path / name / ADAPTER) for name in ("adapter", "again"))
    if kind != "gpt2":  # whose fused layer has become one adapter each for queries, keys and values
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    back = begun(job(base, corpus, **{"from": str(tmp_path / "again")}), tmp_path / "back")
    assert torch.equal(our_logits(back), our_logits(checkpoint))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_merged_weights_are_cast_once_and_their_largest_rounding_is_reported(corpus, tmp_path, dtype):
    checkpoint = begun(job(saved("llama", tmp_path / "base"), corpus), tmp_path / "job", 1)
    exact, cut = (export(str(checkpoint), tmp_path / name, dtype=name) for name in ("fp32", dtype))
    wide, narrow = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("fp32", dtype))
    assert all(torch.equal(wide[name].to(narrow[name].dtype), narrow[name]) for name in wide)
    merged = [name for name in wide if "_proj" in name]
    assert exact.rounding == 0.0
    assert cut.rounding == max((wide[name] - narrow[name].float()).abs().max().item() for name in merged) > 0


def test_layers_that_an_adapter_leaves_out_are_not_changed_by_it(corpus, tmp_path):
    spec, targets = parse_job_spec(job(saved("llama", tmp_path / "base"), corpus)), r".*\.[02]\..*q_proj"
    theirs = made_by_peft("llama", tmp_path / "adapter", target_modules=targets, rank_pattern={"2.*q_proj": 2})
    ours = LoadedModel.of_weights(spec, CPU, adapter=tmp_path / "adapter")
    assert_close(ours.logits(TOKENS), logits_of(theirs))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    made_by_peft("llama", folder)
    return folder


def with_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def with_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / ADAPTER)
    change(tensors)
    save_file(tensors, folder / ADAPTER)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD: dict[str, tuple[Any, str]] = {
    "DoRA": (lambda at: with_config(at, use_dora=True), "use_dora is true: not supported"),
    "modules": (lambda at: with_config(at, modules_to_save=["lm_head"]), r'modules_to_save is \["lm_head"\]: not'),
    "bias": (lambda at: with_config(at, bias="all"), 'bias is "all": only none is supported'),
    "kind": (lambda at: with_config(at, peft_type="IA3"), 'peft_type is "IA3": only LORA is supported'),
    "new key": (lambda at: with_config(at, use_magic=1), "use_magic is 1: not supported"),
    "rank": (lambda at: with_config(at, r=4), r"has shape \[3, 32\], but the model and .* require \[4, 32\]"),
    "no rank": (lambda at: with_config(at, r=0), "r is 0: must be a whole number"),
    "missing": (lambda at: with_tensors(at, lambda t: t.pop(FIRST)), "has no .*q_proj.lora_A.weight, only the other"),
    "unknown": (lambda at: with_tensors(at, lambda t: t.update(x=t[FIRST] + 0)), "of 4 layers, has no adapter x"),
    "shape": (lambda at: with_tensors(at, lambda t: t.update({FIRST: torch.ones(3, 8)})), r"has shape \[3, 8\]"),
    "infinite": (
        lambda at: with_tensors(at, lambda t: t[FIRST].fill_(numpy.inf)), "lora_A.weight has values that are not finite"
    ),
    "cut": (lambda at: (at / ADAPTER).write_bytes((at / ADAPTER).read_bytes()[:-9]), "is truncated"),
    "pickle": (lambda at: (at / ADAPTER).rename(at / "adapter_model.bin"), "is a pickle, which Manta never loads"),
    "absent": (lambda at: shutil.rmtree(at), "has no adapter_config.json"),
    "no json": (lambda at: (at / "adapter_config.json").write_text("{"), "is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_adapter_that_is_damaged_or_computes_something_else_is_refused_by_name(adapter, corpus, tmp_path, what):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    spoil, sentence = BAD[what]
    spoil(folder)
    spec = parse_job_spec(job(saved("llama", tmp_path / "base"), corpus))
    with pytest.raises(WeightsError, match=sentence):
        LoadedModel.of_weights(spec, CPU, adapter=folder)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"rank": 4}, "q_proj has rank 3, but train.lora.rank is 4"),
        (
            {"alpha": 4.0},
            "has scale 1.66667, but that of train.lora is 1.33333 .alpha 4, rank 3, scaling standard",
        ),
        (
            {"targets": ["q"]},
            "has adapters of q, k, v, o, gate, up, down .*, but train.lora.targets are q, in all 4",
        ),
    ],
)
def test_job_that_differs_from_its_adapter_is_refused_at_submission(adapter, corpus, tmp_path, lora, sentence):
    with pytest.raises(SpecError, match=sentence):
        job(saved("llama", tmp_path / "base"), corpus, **{"from": str(adapter)}, **lora)


def test_fused_adapter_of_several_blocks_that_overlap_is_refused_when_training_begins(corpus, tmp_path):
    base = saved("gpt2", tmp_path / "base")
    made_by_peft("gpt2", tmp_path / "adapter", target_modules=["c_attn"], r=3 * RANK, lora_alpha=15)
    document = job(base, corpus, targets=["q", "k", "v"], **{"from": str(tmp_path / "adapter")})
    with pytest.raises(WeightsError, match="of rank 9 is not one block of rank 3 for each of q, k, v"):
        begun(document, tmp_path / "job")


def test_adapter_beside_its_weights_is_evaluated_like_the_job_that_made_it(corpus, tmp_path, capsys):
    base = saved("llama", tmp_path / "base")
    made_by_peft("llama", tmp_path / "adapter")
    (base / "tokenizer.json").write_text(json.dumps(byte_tokenizer(has_end=True)))
    (tmp_path / "text.txt").write_text("to be or")
    checkpoint = begun(job(base, corpus, **{"from": str(tmp_path / "adapter")}), tmp_path / "job")
    losses = []
    for place in ([base], [base, "--adapter", tmp_path / "adapter"], [checkpoint]):
        assert evaluate.main([*map(str, place), "--text", str(tmp_path / "text.txt"), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[1] == pytest.approx(losses[2], rel=1e-6) and abs(losses[0] - losses[1]) > 0.01
    assert generate.main([str(checkpoint), "--adapter", str(tmp_path / "adapter"), "--prompt", "a"]) == 2
    assert "has adapters of its own: leave out --adapter" in capsys.readouterr().err


def test_export_of_adapters_of_a_job_without_any_is_refused(corpus, tmp_path):
    document = job(saved("llama", tmp_path / "base"), corpus)
    document["train"]["lora"] = None
    with pytest.raises(WeightsError, match=r"has no adapters \(train.lora\): export its weights in another"):
        export(str(begun(document, tmp_path / "job")), tmp_path / "adapter", "adapter")
