"""Rows of a checkpoint's tensors: of rectangles below and beside one another, in several files, some in between."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy
import pytest
import torch

from manta.workers.checkpoint import stored_rows
from manta.workers.checkpoint.catalog import Manifest
from manta.workers.checkpoint.contents import Contents, StoredRectangle, StoredTensor
from manta.workers.checkpoint.stored_rows import StoredRows, in_file_order, peak_memory
from manta.workers.errors import CheckpointError

MATRIX, VECTOR = torch.arange(60.0).view(10, 6), torch.arange(5.0).bfloat16()
CUTS = [("a", 0, 6, 0, 3), ("b", 0, 6, 3, 6), ("a", 6, 7, 0, 4), ("c", 6, 7, 4, 6), ("c", 7, 10, 0, 6)]
"""File, first row and end, first column and end."""


@pytest.fixture
def written(tmp_path) -> tuple[Path, Manifest, Contents]:
    """The matrix in rectangles, and behind them the vector."""
    pieces = [(file, (a, c), MATRIX[a:b, c:d].clone()) for file, a, b, c, d in CUTS]
    content: dict[str, bytearray] = {name: bytearray() for name in "abc"}
    rectangles = []
    for file, offsets, values in [*pieces, ("b", (0,), VECTOR)]:
        torch.save(values, tmp_path / "archive")
        archive = (tmp_path / "archive").read_bytes()
        rectangles.append(StoredRectangle(offsets, tuple(values.shape), file, len(content[file]), len(archive)))
        content[file] += archive
    for name, content_of in content.items():
        (tmp_path / name).write_bytes(content_of)
    blocks = {name: [zlib.crc32(each)] for name, each in content.items()}
    manifest = Manifest("job", 1, 1, {name: len(each) for name, each in content.items()}, {}, blocks=blocks)
    matrix = StoredTensor((10, 6), "float32", tuple(rectangles[:-1]))
    contents = Contents({"vector": StoredTensor((5,), "bfloat16", (rectangles[-1],)), "matrix": matrix})
    contents.check(manifest)
    return tmp_path, manifest, contents


def test_any_range_of_stored_rows_equals_that_of_the_tensor(written):
    with StoredRows(*written) as rows:
        for first in range(10):
            for end in range(first + 1, 11):
                matrix = numpy.full((end - first, 6), numpy.nan, numpy.float32)
                for part in rows.read("matrix", first, end):
                    assert numpy.isnan(matrix[part.rows, part.columns]).all(), "each once"
                    matrix[part.rows, part.columns] = part.values
                assert numpy.array_equal(matrix, MATRIX[first:end].numpy())


def test_vector_is_read_as_one_column_and_bfloat16_as_its_bits(written):
    with StoredRows(*written) as rows:
        (part,) = rows.read("vector", 1, 4)
        assert part.values.shape == (3, 1)
        assert part.values[:, 0].tolist() == VECTOR[1:4].view(torch.uint16).tolist()


def test_tensors_come_in_the_order_of_their_files(written):
    assert in_file_order(written[2].tensors.items()) == ["matrix", "vector"]


def test_peak_memory_of_stored_rows_grows_with_the_files_that_hold_one_row(written, monkeypatch):
    monkeypatch.setattr(stored_rows, "MAX_OPEN", 1)
    tensors = written[2].tensors
    assert peak_memory([tensors["matrix"]], 1) > peak_memory([tensors["vector"]], 1)


def test_reading_stored_rows_that_the_checkpoint_lacks_is_an_error(written):
    path, manifest, contents = written
    matrix = contents.tensors["matrix"]
    lacking = Contents({"matrix": StoredTensor(matrix.shape, matrix.dtype, matrix.rectangles[:-2])})
    with StoredRows(path, manifest, lacking) as rows:
        assert len(list(rows.read("matrix", 0, 6))) == 2
        with pytest.raises(CheckpointError, match="does not hold all of matrix"):
            list(rows.read("matrix", 5, 7))


def test_archive_whose_dtype_differs_from_the_contents_file_is_refused(written):
    path, manifest, contents = written
    said = json.loads(contents.to_bytes())
    said["tensors"]["vector"]["dtype"] = "float16"
    problem = r"/b is as it was written, but cannot be read: .*no float16\(5,\)"
    other = Contents.from_bytes(json.dumps(said).encode())
    with StoredRows(path, manifest, other) as rows, pytest.raises(CheckpointError, match=problem):
        list(rows.read("vector", 0, 5))
