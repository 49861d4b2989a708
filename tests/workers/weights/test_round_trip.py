"""Models of `transformers` in, under every layout, and out again: the same logits and the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_programs import save, trainer_of
from engine_specs import axes, layout_of
from rank_programs import micro_batches
from safetensors.torch import load_file
from their_models import KINDS, saved

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.comm.comm import Comm
from manta.workers.protocol.messages import Resume
from manta.workers.spec.submitted import with_shape_of_weights
from manta.workers.weights.export import export

LENGTH = 8
LAYOUTS = [(1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 2)]
FAST = [
    ("llama", (4, 1, 1)), ("llama, all heads, biases, tied", (1, 4, 1)), ("mistral", (1, 1, 1)), ("qwen3", (2, 2, 2)),
    ("gpt2", (2, 2, 2)), ("gpt2, exact gelu, untied", (2, 1, 1)),
]  # fmt: skip
ALL = [pytest.param(kind, layout, marks=pytest.mark.soak) for kind in KINDS for layout in LAYOUTS]


def begin_and_save(comm: Comm, document: dict, folder: str, windows: torch.Tensor) -> float:
    """Begin with the weights, save them without a step, and evaluate."""
    trainer = trainer_of(comm, document, folder)
    trainer.restore(Resume())
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
