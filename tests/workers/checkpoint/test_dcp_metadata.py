"""`.metadata` is put together without torch's classes, and says what torch's own writer would have said."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_reader import metadata_by_torch

from manta.workers.checkpoint.contents import Contents, StoredRectangle, StoredTensor
from manta.workers.checkpoint.dcp_metadata import metadata_file
from manta.workers.checkpoint.opening import METADATA, read_metadata
from manta.workers.protocol.json_codec import MalformedMessage

FAR = 2**31
CONTENTS = Contents(
    {
        "model.größe": StoredTensor(
            (5, 3),
            "float32",
            (
                StoredRectangle((0, 0), (2, 3), "__0_0.distcp", 0, 700),
                StoredRectangle((2, 0), (3, 3), "__1_0.distcp", FAR - 1, FAR),
            ),
        ),
        "model.scale": StoredTensor((), "bfloat16", (StoredRectangle((), (), "__0_0.distcp", 2**40, 2**33),)),
        "exp_avg.half": StoredTensor((300,), "float16", (StoredRectangle((0,), (300,), "__1_0.distcp", 256, 1),)),
        "exp_avg.wide": StoredTensor((FAR,), "float64", (StoredRectangle((0,), (FAR,), "__1_0.distcp", 0, 1),)),
        "model.none": StoredTensor((0,), "float32", ()),
    }
)


def written_by_torch(contents: Contents, folder: Path) -> Any:
    """What its writer makes of the same tensors and places, read again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import metadata as records
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    tensors, places = {}, []
    for name, tensor in contents.tensors.items():
        chunks = [records.ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)) for r in tensor.rectangles]
        properties = records.TensorProperties(dtype=getattr(torch, tensor.dtype))
        tensors[name] = records.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for r in tensor.rectangles:
            index, place = records.MetadataIndex(name, r.offsets), _StorageInfo(r.file, r.at, r.bytes)
            places.append(WriteResult(index, r.bytes, place))
    folder.mkdir()
    dcp.FileSystemWriter(folder).finish(records.Metadata(tensors), [places])
    return metadata_by_torch(folder)


def test_torch_reads_our_metadata_file_like_its_own(tmp_path):
    (tmp_path / METADATA).write_bytes(metadata_file(CONTENTS))
    ours, expected = metadata_by_torch(tmp_path), written_by_torch(CONTENTS, tmp_path / "theirs")
    assert ours.state_dict_metadata == expected.state_dict_metadata
    assert ours.storage_data == expected.storage_data
    assert (ours.version, ours.planner_data) == (expected.version, expected.planner_data)
    sizes = [chunk.sizes for tensor in ours.state_dict_metadata.values() for chunk in tensor.chunks]
    assert all(isinstance(each, torch.Size) for each in sizes)


def test_metadata_file_can_be_read_without_torch():
    read = read_metadata(io.BytesIO(metadata_file(CONTENTS)))
    assert dict(read.tensors) == dict(CONTENTS.tensors)


def test_metadata_of_a_tensor_of_unsupported_dtype_is_refused():
    with pytest.raises(MalformedMessage, match=r"model\.x is of 'int8', which no checkpoint holds"):
        metadata_file(Contents({"model.x": StoredTensor((1,), "int8", ())}))
