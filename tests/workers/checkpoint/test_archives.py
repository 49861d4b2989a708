"""Where the elements lie in an archive of torch.save: found without torch, whatever tensor it is; nothing is run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import Any

import numpy
import pytest
import torch

from manta.workers.checkpoint import archives
from manta.workers.checkpoint.archives import elements_of
from manta.workers.checkpoint.stored_rows import RAW


def archive_of(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def elements_in(content: bytes) -> archives.Elements:
    return elements_of(lambda at, count: numpy.frombuffer(content[at : at + count], numpy.uint8), len(content))


def values_in(content: bytes) -> numpy.ndarray:
    elements = elements_in(content)
    count = int(numpy.prod(elements.sizes))
    return numpy.frombuffer(content, RAW[elements.dtype], count, elements.at).reshape(elements.sizes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (7,), (1, 5), (300, 17)])
def test_elements_read_from_an_archive_are_those_of_the_tensor(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    elements = elements_in(archive_of(tensor))
    assert (elements.dtype, elements.sizes) == (str(dtype).removeprefix("torch."), shape)
    same = tensor.view(torch.uint16) if dtype == torch.bfloat16 else tensor
    assert numpy.array_equal(values_in(archive_of(tensor)), same.numpy())


def test_slice_of_a_larger_storage_is_read_from_its_offset():
    tensor = torch.arange(12.0)[5:9]
    assert values_in(archive_of(tensor)).tolist() == [5.0, 6.0, 7.0, 8.0]


def test_stride_of_a_single_row_is_ignored():
    tensor = torch.arange(32.0).view(4, 8)[1:2, :4]
    assert tensor.stride() == (8, 1)
    assert values_in(archive_of(tensor)).tolist() == [[8.0, 9.0, 10.0, 11.0]]


def test_elements_beyond_the_first_bytes_are_found_by_the_archives_directory(monkeypatch):
    content = archive_of(torch.arange(6.0).view(2, 3))
    for size in (0, 64, 300, 500):
        monkeypatch.setattr(archives, "BEGINNING_BYTES", size)
        assert values_in(content).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize("tensor", [torch.zeros(3, 4).t(), torch.zeros(4, 6)[:, ::2]])
def test_a_tensor_in_several_pieces_is_refused(tensor):
    with pytest.raises(pickle.UnpicklingError, match="do not lie one after the other"):
        elements_in(archive_of(tensor))


def test_archive_without_a_float_tensor_is_refused():
    for value, problem in (([1, 2], "it holds a list"), (torch.zeros(2, dtype=torch.int64), "torch.LongStorage")):
        with pytest.raises(pickle.UnpicklingError, match=problem):
            elements_in(archive_of(value))
    with pytest.raises(zipfile.BadZipFile):
        elements_in(b"no archive at all" * 100)


def test_call_named_by_a_pickle_is_refused_and_not_run(tmp_path):
    class Call:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "it ran"),)

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Call()))
        archive.writestr("archive/data/0", bytes(16))
    with pytest.raises(pickle.UnpicklingError, match="which no tensor needs, and was refused"):
        elements_in(stream.getvalue())
    assert not (tmp_path / "it ran").exists()


def test_bytes_in_the_order_of_another_machine_are_refused():
    content = archive_of(torch.zeros(2)).replace(b"little", b"bigger")
    with pytest.raises(ValueError, match="order of another machine"):
        elements_in(content)
