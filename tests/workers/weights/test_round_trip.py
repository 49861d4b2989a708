"""Weights that go out and come back, in any type."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from checkpoint_programs import save, trainer_of
from engine_specs import axes, layout_of
from rank_programs import micro_batches
from safetensors.torch import load_file
from their_models import KINDS, saved

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.checkpoint.stored_rows import RAW
from manta.workers.comm.comm import Comm
from manta.workers.protocol.messages import Resume
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.submitted import with_shape_of_weights
from manta.workers.weights.export import export
from manta.workers.weights.stream_out import CHUNK, TooLarge, cast

LENGTH = 8
LAYOUTS = [(1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 2)]
FAST = [
    ("llama", (4, 1, 1)), ("llama, all heads, biases, tied", (1, 4, 1)), ("mistral", (1, 1, 1)), ("qwen3", (2, 2, 2)),
    ("mixtral", (2, 1, 1)), ("qwen3_moe", (2, 2, 1)), ("deepseek", (2, 2, 2)), ("deepseek", (1, 1, 1)),
    ("deepseek, plain queries, dense", (4, 1, 1)), ("gpt2", (2, 2, 2)), ("gpt2, exact gelu, untied", (2, 1, 1)),
]  # fmt: skip
ALL = [pytest.param(kind, layout, marks=pytest.mark.soak) for kind in KINDS for layout in LAYOUTS]


def begin_and_save(comm: Comm, document: dict, folder: str, windows: torch.Tensor, steps: int = 0) -> float:
    """Begin with the weights, save them after some steps, and evaluate."""
    trainer = trainer_of(comm, document, folder)
    trainer.restore(Resume())
    for _ in range(steps):
        batch = micro_batches(trainer.spec, comm.index("data"), windows)
        assert trainer.engine.step(batch, len(windows), 1e-3, 0).updated
    save(trainer)
    losses_m, tokens = trainer.engine.pipeline.evaluate(micro_batches(trainer.spec, comm.index("data"), windows))
    both = torch.stack([losses_m.sum(), tokens])
    comm.all_reduce("world", both)
    return (both[0] / both[1]).item()


def job(folder: Path, corpus: str, layout: tuple[int, int, int], **model) -> dict:
    document = {
        "model": {"from": str(folder), "sequence_length": LENGTH, **model},
        "data": {"source": "text", "paths": [corpus]},
        "train": {"steps": 1, "global_batch_size": 8},
        "parallel": axes(layout),
    }
    return with_shape_of_weights(document)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("kind", "layout"), FAST + [case for case in ALL if case.values not in FAST], ids=str)
def test_transformers_model_keeps_its_loss_and_weights_through_import_and_export(kind, layout, ranks, corpus, tmp_path):
    transformers = pytest.importorskip("transformers")
    dtype = torch.bfloat16 if layout[2] == 2 else torch.float32
    source = saved(kind, tmp_path / "in", dtype)
    windows = torch.randint(256, (8, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    document = job(source, corpus, layout)
    losses = ranks.run(layout_of(*layout), begin_and_save, document, str(tmp_path / "checkpoints"), windows)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    logits = theirs(windows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert losses == pytest.approx([expected.item()] * len(losses), rel=1e-5)

    checkpoint = complete_checkpoints(tmp_path / "checkpoints")[-1][0]
    done = export(str(checkpoint), tmp_path / "out", shard_bytes=30_000)
    assert done.dtype == str(dtype).removeprefix("torch.")
    before, after = tensors(source), tensors(tmp_path / "out")
    if kind.startswith("gpt2"):  # of the positions those that the job's sequences have
        before["transformer.wpe.weight"] = before["transformer.wpe.weight"][:LENGTH]
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(again(windows[:, :-1]).logits, logits)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "checkpoints", "out"}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek"])
def test_trained_experts_have_the_same_loss_in_transformers(kind, ranks, corpus, tmp_path):
    transformers = pytest.importorskip("transformers")
    source, layout = saved(kind, tmp_path / "in"), (2, 1, 2)
    windows = torch.randint(256, (8, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    moves = {"moe": {"balance": {"bias_rate": 0.01}}} if kind == "deepseek" else {}
    document = job(source, corpus, layout, **moves)
    document["parallel"]["expert"] = 1 if kind == "mixtral" else 2  # which has an odd number of them
    arguments = document, str(tmp_path / "checkpoints"), windows, 20
    losses = ranks.run(parse_job_spec(document).layout, begin_and_save, *arguments)
    checkpoint = complete_checkpoints(tmp_path / "checkpoints")[-1][0]
    export(str(checkpoint), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    logits = theirs(windows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert losses == pytest.approx([expected.item()] * len(losses), rel=1e-5)
    before, after = tensors(source), tensors(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) > 0.9 * len(before)
    moved = {name for name in before if name.endswith("e_score_correction_bias")}
    assert moved <= changed and bool(moved) == (kind == "deepseek")


SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), 1e-45, -1e-40, 3.4028235e38, 65504.0, 65000.0, 5.9e-8, 2.0**-14]
COUNT = 2 * CHUNK + 16


def numbers(dtype: torch.dtype, most: float) -> torch.Tensor:
    """Of all sizes; the special ones; and what lies on, or beside, the middle between two numbers of bfloat16 and
    float16."""
    bits = torch.randint(-(2**31), 2**31, (COUNT,), generator=torch.Generator().manual_seed(2)).int()
    bits[: COUNT // 2] &= ~0x1FFF  # middles between numbers of float16 among them
    bits[: COUNT // 4] = (bits[: COUNT // 4] & ~0xFFFF) | 0x8000  # and of bfloat16
    bits[10:20] += 1
    values = bits.view(torch.float32)
    values[20 : 20 + len(SPECIAL)] = torch.tensor(SPECIAL)
    values = torch.where(values.isnan() | ((values.abs() > most) & values.isfinite()), 0.1, values)
    return values.to(dtype)


def raw(tensor: torch.Tensor) -> numpy.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 8, COUNT])
def test_cast_has_the_bits_of_torchs(dtype, to, columns):
    most = 65000.0 if torch.float16 in (dtype, to) else 3e38
    values = numbers(dtype, most).view(-1, columns)
    into = numpy.empty(values.shape, RAW[name_of(to)])
    cast(raw(values), name_of(dtype), into, name_of(to))
    assert into.tobytes() == raw(values.to(to)).tobytes()


def test_cast_handles_columns_of_wider_arrays_and_odd_addresses():
    values = numbers(torch.float32, 3e38).view(-1, 16)
    odd = numpy.empty(values.numel() * 4 + 1, numpy.uint8)[1:].view("<f4").reshape(values.shape)
    odd[...] = values.numpy()
    into = numpy.zeros((len(values), 40), "<u2")
    cast(odd, "float32", into[:, 20:36], "bfloat16")
    assert numpy.array_equal(into[:, 20:36], raw(values.bfloat16()))
    assert not into[:, :20].any() and not into[:, 36:].any()


def test_nan_stays_nan_when_cast_to_bf16():
    values = numpy.array([[0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000]], numpy.uint32).view("<f4")
    into = numpy.empty((1, 4), "<u2")
    cast(values, "float32", into, "bfloat16")
    assert torch.from_numpy(into).view(torch.bfloat16).isnan().tolist() == [[True, True, True, False]]


def test_cast_refuses_numbers_too_large_for_float16_but_not_infinity():
    into = numpy.empty((1, 3), "<f2")
    cast(numpy.array([[numpy.inf, -numpy.inf, 65504.0]], "<f4"), "float32", into, "float16")
    assert into.tolist() == [[numpy.inf, -numpy.inf, 65504.0]]
    with pytest.raises(TooLarge, match=r"a value of 7e\+04"):
        cast(numpy.array([[1.0, -70000.0, 66000.0]], "<f4"), "float32", into, "float16")
