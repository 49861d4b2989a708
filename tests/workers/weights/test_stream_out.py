"""What is brought into new files fits them, and takes no more memory than it may."""

import pytest
from engine_specs import spec

from manta.workers.checkpoint.catalog import Manifest
from manta.workers.checkpoint.contents import Contents, StoredRectangle, StoredTensor
from manta.workers.errors import CheckpointError
from manta.workers.storage.locations import parse_location
from manta.workers.weights.mapping import huggingface_tensors
from manta.workers.weights.stream_out import MAX_THREADS, Source, threads_for, write_tensors


@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (-1, 0), (0, 1)])
def test_export_names_a_parameter_of_another_shape_before_writing(tmp_path, rows, columns):
    theirs = huggingface_tensors(spec(model={"family": "llama", "layers": 1, "hidden_size": 16}))
    shapes: dict[str, tuple[int, int]] = {}
    for tensor in theirs:
        for piece in tensor.pieces:
            height, _ = shapes.get(piece.ours, (0, 0))
            shapes[piece.ours] = height + piece.count * piece.length, (*tensor.rows_first, 1)[1]
    changed = "layers.0.mlp.down.weight"
    shapes[changed] = shapes[changed][0] + rows, shapes[changed][1] + columns
    stored = {f"model.{name}": StoredTensor(shape, "float32", ()) for name, shape in shapes.items()}
    source = Source(parse_location(tmp_path), Manifest("job", 1, 1, {}, {}), Contents(stored))
    with pytest.raises(CheckpointError, match=rf"should be .*, found .* as {changed}"):
        write_tensors(source, theirs, "float32", None, 1)  # type: ignore[arg-type]


def test_export_uses_as_many_threads_as_memory_allows():
    def beside_each_other(files: int) -> StoredTensor:
        each = [StoredRectangle((0, n), (8, 1), f"{n}", 0, 1000) for n in range(files)]
        return StoredTensor((8, files), "float32", tuple(each))

    assert [threads_for([beside_each_other(1)], processors) for processors in (1, 2, 64)] == [1, 2, MAX_THREADS]
    assert threads_for([beside_each_other(1), beside_each_other(64)], 64) == 1
