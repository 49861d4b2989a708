"""A job whose start is repeated before it has a checkpoint begins with the same weights and adapter, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_programs import lone, save
from safetensors.torch import load_file, save_file
from their_models import saved

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.errors import WeightsError
from manta.workers.protocol.messages import Resume
from manta.workers.spec.submitted import with_shape_of_weights
from manta.workers.weights.initial_record import FILE_NAME


def change(file: Path) -> None:
    """Of one tensor all values, which keep their shape."""
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name] * 1.01}, file, {"format": "pt"})


def test_start_that_finds_other_weights_is_refused_until_there_is_a_checkpoint(corpus, tmp_path):
    base, folder = saved("llama", tmp_path / "base"), tmp_path / "job"
    document = with_shape_of_weights(
        {
            "model": {"from": str(base), "sequence_length": 8},
            "data": {"source": "text", "paths": [corpus]},
            "train": {"steps": 9, "global_batch_size": 2, "lora": {"rank": 2}},
        }
    )

    def begin(generation: int, resume: Resume) -> torch.Tensor:
        trainer = lone(document, folder, generation, corpus_record=folder / "corpus.json")
        trainer.restore(resume)
        trainer.train_step()
        if resume.source != "start" or generation == 3:
            save(trainer)
        return trainer.engine.flat.parameters.clone()

    before = begin(1, Resume())
    kept, file = tmp_path / "kept", sorted(base.glob("*.safetensors"))[1]
    shutil.copytree(base, kept)
    change(file)
    with pytest.raises(
        WeightsError, match=r"model.from: .*base is not what it was .* its digest is \w{64} and was \w{64}; "
    ):
        begin(2, Resume())
    shutil.copy(kept / file.name, file)
    assert torch.equal(begin(3, Resume()), before)
    shutil.rmtree(base)
    (path, manifest) = complete_checkpoints(folder)[-1]
    begin(4, Resume("checkpoint", 1, str(path), began=3))
    assert complete_checkpoints(folder)[-1][1].frozen == manifest.frozen
    assert (folder / FILE_NAME).is_file()


def test_record_that_makes_no_sense_does_not_prevent_a_start(corpus, tmp_path):
    from manta.workers.spec.reading import parse_job_spec
    from manta.workers.weights.initial_record import check_unchanged

    spec = parse_job_spec(
        with_shape_of_weights(
            {
                "model": {"from": str(saved("llama", tmp_path / "base")), "sequence_length": 8},
                "data": {"source": "text", "paths": [corpus]},
                "train": {"steps": 9, "global_batch_size": 2},
            }
        )
    )
    (tmp_path / FILE_NAME).write_text("[")
    check_unchanged(spec, tmp_path / FILE_NAME)
