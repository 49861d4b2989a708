"""Whatever somebody has put into a checkpoint, nothing of it runs when it is loaded."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_programs import bits, is_still, job, lone, make_older, reseal, save
from torch_reader import metadata_by_torch

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.checkpoint.contents import CONTENTS, Contents
from manta.workers.checkpoint.opening import METADATA
from manta.workers.errors import CheckpointError
from manta.workers.protocol.json_codec import to_json
from manta.workers.protocol.messages import Resume
from manta.workers.trainer import Trainer

DATA, MODEL = "__0_0.distcp", {"hidden_size": 16, "layers": 1}
NAME = "model.final_norm.weight"


class Calls:
    """An object that is a call of `function` when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


@pytest.fixture(scope="module")
def written(corpus, tmp_path_factory) -> tuple[Path, list[torch.Tensor]]:
    """A checkpoint of step 1, and the state that it holds."""
    folder = tmp_path_factory.mktemp("written")
    trainer = lone(job(corpus, {}, model=MODEL), folder)
    trainer.restore(Resume())
    trainer.train_step()
    save(trainer)
    return complete_checkpoints(folder)[-1][0], bits(trainer)


@pytest.fixture(scope="module")
def reader(corpus, tmp_path_factory) -> Trainer:
    """Another trainer of the same job."""
    return lone(job(corpus, {}, model=MODEL, train={"seed": 5}), tmp_path_factory.mktemp("reader"))


@pytest.fixture
def path(written, reader, tmp_path) -> Path:
    """A copy that may be changed, and a reader whose state is another one."""
    reader.restore(Resume())
    return shutil.copytree(written[0], tmp_path / written[0].name)


@pytest.fixture
def trap(tmp_path) -> Path:
    """A file that is there as soon as something has run."""
    return tmp_path / "it ran"


def restore(reader: Trainer, path: Path) -> None:
    reader.state.checkpoints.restore(str(path))


def test_a_pickle_beside_the_contents_is_not_read(written, reader, path, trap):
    (path / METADATA).write_bytes(pickle.dumps(Calls(os.system, f"touch '{trap}'")))
    reseal(path)
    restore(reader, path)
    assert is_still(reader, written[1])
    assert not trap.exists()


def test_checkpoint_in_the_older_format_restores_the_same_bits(written, reader, path):
    make_older(path)
    restore(reader, path)
    assert is_still(reader, written[1])


def hidden_in_the_real_one(call: Calls, path: Path) -> Any:
    """What the older checkpoint holds, and the call in a place that nobody looks at."""
    metadata = metadata_by_torch(path)
    metadata.planner_data = call
    return metadata


@pytest.mark.parametrize("hidden", [False, True], ids=["as a whole", "hidden"])
@pytest.mark.parametrize("which", ["os.system", "eval", "a method of a known class"])
def test_older_checkpoint_whose_metadata_names_a_call_is_refused(reader, path, trap, hidden, which):
    calls = {
        "os.system": (Calls(os.system, f"touch '{trap}'"), "posix.system"),
        "eval": (Calls(eval, f"open({str(trap)!r}, 'w')"), "builtins.eval"),
        "a method of a known class": (Calls(Path.touch, trap), "pathlib.Path.touch|builtins.getattr"),
    }
    call, name = calls[which]
    (path / METADATA).write_bytes(pickle.dumps(hidden_in_the_real_one(call, path) if hidden else call))
    make_older(path)
    before = bits(reader)
    with pytest.raises(CheckpointError, match=f"asks for ({name}), which no .metadata needs, and was refused"):
        restore(reader, path)
    assert is_still(reader, before)
    assert not trap.exists()


def test_pickle_in_place_of_tensor_data_is_not_executed(reader, path, trap):
    contents = spelled_out(path)
    torch.save(Calls(os.system, f"touch '{trap}'"), path / DATA)
    (stored,) = contents["tensors"][NAME]["rectangles"]
    stored.update(at=0, bytes=(path / DATA).stat().st_size)
    contents["tensors"] = {
        name: {**entry, "rectangles": [{**stored, **shape_of(entry)}]} for name, entry in tensors(contents)
    }
    (path / CONTENTS).write_text(json.dumps(contents))
    reseal(path)
    before = bits(reader)
    with pytest.raises(CheckpointError, match=f"{DATA} is as it was written, but cannot be read: UnpicklingError"):
        restore(reader, path)
    assert is_still(reader, before)
    assert not trap.exists()


def spelled_out(path: Path) -> dict[str, Any]:
    """The contents as releases before wrote them, each rectangle an object; they are read as ever."""
    tensors = Contents.from_bytes((path / CONTENTS).read_bytes()).tensors
    return {"tensors": {name: to_json(tensor) for name, tensor in tensors.items()}}


def tensors(contents: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(contents["tensors"].items())


def shape_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The rectangle that is the whole tensor."""
    return {"offsets": [0] * len(entry["shape"]), "sizes": entry["shape"]}


@pytest.mark.parametrize(("change", "problem"), [
    ({"file": "../elsewhere"}, "lies in '../elsewhere', which is not a file of this checkpoint"),
    ({"file": "another"}, "lies in 'another', which is not a file of this checkpoint"),
    ({"at": -1}, "goes beyond the end of __0_0.distcp"),
    ({"bytes": 1 << 60}, "goes beyond the end of __0_0.distcp"),
    ({"offsets": [-1]}, "lies outside of its shape"),
    ({"sizes": [17]}, "lies outside of its shape"),
    ({"sizes": [16, 1]}, "lies outside of its shape"),
    ({"sizes": "16"}, "must be a list, not '16'"),
    ({"at": 0}, "no torch.float32\\(16,\\) begins at byte 0"),
], ids=lambda each: str(each)[:40])  # fmt: skip
def test_contents_that_make_no_sense_are_refused_in_one_sentence(reader, path, change, problem):
    contents = spelled_out(path)
    if change == {"at": 0}:
        first = contents["tensors"]["model.embedding.token.weight"]["rectangles"][0]
        change = {"at": 0, "bytes": first["bytes"]}
    contents["tensors"][NAME]["rectangles"][0].update(change)
    (path / CONTENTS).write_text(json.dumps(contents))
    reseal(path)
    before = bits(reader)
    with pytest.raises(CheckpointError, match=problem) as caught:
        restore(reader, path)
    assert "\n" not in str(caught.value)
    assert is_still(reader, before)
