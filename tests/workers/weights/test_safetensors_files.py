"""New safetensors files: tensors in any order and from several threads are what the library reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy
import pytest
from safetensors.numpy import load_file

from manta.workers.weights import folder
from manta.workers.weights.folder import NewFiles, NewTensor, plan_files

TENSORS = [NewTensor("a", (3, 4)), NewTensor("b", (5,)), NewTensor("c", (2, 2))]


def test_safetensors_pieces_may_come_in_any_order_and_gaps_are_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "FLUSH_BYTES", 8)
    written: list[int] = []
    values = numpy.arange(12, dtype=numpy.float32)
    pieces = [("c", 0, values[:4]), *(("a", 4 * n, values[n : n + 3]) for n in (9, 0, 6, 3))]
    planned = plan_files(TENSORS, "float32", 60)
    with NewFiles(tmp_path, planned, "float32", written.append) as files, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: files.write(*piece), pieces))
    assert sum(written) == 16 + 48
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    first, second = (load_file(tmp_path / name) for name in names)
    assert first["a"].tolist() == values.reshape(3, 4).tolist()
    assert second["b"].tolist() == [0.0] * 5
    assert second["c"].tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(("most", "held"), [(67, "a bc"), (68, "ab c"), (84, "abc"), (1, "a b c")])
def test_safetensors_file_holds_as_many_bytes_as_allowed(most, held):
    """Of 48, 20 and 16; one that is larger than that has a file of its own."""
    planned = plan_files(TENSORS, "float32", most)
    assert " ".join("".join(tensor.name for tensor in file) for file in planned.values()) == held


def test_safetensors_write_beyond_its_tensor_is_refused(tmp_path):
    planned, problem = plan_files(TENSORS, "float32", 1000), "a has 48 bytes, not 52"
    with NewFiles(tmp_path, planned, "float32") as files, pytest.raises(ValueError, match=problem):
        files.write("a", 40, bytes(12))


def test_failed_flush_fails_the_whole_write(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "FLUSH_BYTES", 8)
    monkeypatch.setattr(folder.os, "fdatasync", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"), NewFiles(tmp_path, {"file": TENSORS}, "float32") as files:
        files.write("a", 0, bytes(8))
