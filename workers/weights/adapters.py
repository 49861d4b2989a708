"""Values of low-rank adapters, those of a checkpoint and those in the format of PEFT (`peft.py`): read, and merged into
weights. As arrays, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from manta.workers.checkpoint.stored_rows import RAW, StoredRows
from manta.workers.config import JobSpec, LoraConfig, ModelConfig
from manta.workers.data.read_errors import weights_error
from manta.workers.errors import WeightsError
from manta.workers.system.regular_files import open_regular
from manta.workers.weights.folder import NAMES, FileTensor
from manta.workers.weights.mapping import Piece, pieces_of
from manta.workers.weights.peft import PeftModule, adapter_of, new_modules, read_peft, scale_of, target_of

_DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Adapter:
    """The adapter of a logical matrix: its weight is W + B A."""

    a: numpy.ndarray
    """[rank, columns], fp32."""
    b: numpy.ndarray
    """[rows, rank], fp32; the scale is in it."""


class Merger:
    """Adds adapters to weights, in fp32."""

    def __init__(self, model: ModelConfig, read: Mapping[str, Callable[[], Adapter]]):
        """`read`: reads the adapters, by the names of our logical matrices in the whole model."""
        self._read, self._pieces = read, pieces_of(model)

    def adapters_of(self, name: str) -> list[tuple[Piece, Adapter]]:
        """The adapters of the weight `name`, and the rows that they belong to; none for other parameters."""
        return [(piece, self._read[matrix]()) for matrix, piece in self._pieces.get(name, ()) if matrix in self._read]


def add(adapters: Sequence[tuple[Piece, Adapter]], first: int, band: numpy.ndarray) -> None:
    """Add `adapters` to `band` [rows, columns], fp32, which are rows from `first` on of their weight."""
    for piece, adapter in adapters:
        for row, theirs, count in piece.runs(first, first + len(band)):
            band[row - first : row - first + count] += adapter.b[theirs : theirs + count] @ adapter.a


def stored_adapters(spec: JobSpec, rows: StoredRows) -> Merger:
    """The adapters of a job, read from its checkpoint."""
    lora = spec.train.lora
    read = {} if lora is None else {matrix: _reader(rows, matrix, lora) for matrix in _adapted(spec.model, lora)}
    return Merger(spec.model, read)


def _adapted(model: ModelConfig, lora: LoraConfig) -> list[str]:
    return [matrix for each in new_modules(model, lora) for matrix in each.adapted]


def _reader(rows: StoredRows, matrix: str, lora: LoraConfig) -> Callable[[], Adapter]:
    def read() -> Adapter:
        a, b = (stored_matrix(rows, f"{matrix}.lora_{end}") for end in "ab")
        b *= numpy.float32(scale_of(lora))
        return Adapter(a, b)

    return read


def stored_matrix(rows: StoredRows, name: str) -> numpy.ndarray:
    """A matrix A or B of a checkpoint, whose trained parameters are in fp32. Raises CheckpointError."""
    height, width = rows.shape(f"model.{name}")
    values = numpy.empty((height, width), numpy.float32)
    for part in rows.read(f"model.{name}", 0, height):
        values[part.rows, part.columns] = part.values
    return values


def peft_adapters(folder: Path, model: ModelConfig) -> Merger:
    """The adapters in a folder. Raises WeightsError if they are not of such a model."""

    def reader(module: PeftModule, matrix: str) -> Callable[[], Adapter]:
        first, end = module.rows_of(matrix)
        return lambda: Adapter(_values(module.a), _values(module.b)[first:end] * numpy.float32(module.scale))

    modules = read_peft(folder, model)
    return Merger(model, {matrix: reader(each, matrix) for each in modules for matrix in each.module.matrices})


def _values(tensor: FileTensor) -> numpy.ndarray:
    """A matrix in a file, in fp32. Raises WeightsError."""
    raw = numpy.empty(tensor.shape, RAW[_DTYPES[tensor.dtype]])
    try:
        with open_regular(tensor.file, buffering=0) as file:
            file.seek(tensor.first)
            count = file.readinto(raw.data.cast("B"))  # type: ignore[attr-defined]
    except OSError as error:
        raise weights_error(tensor.file, error) from error
    if count != raw.nbytes:
        raise WeightsError(f"{tensor.file} is truncated: {tensor.name} extends past its end")
    values = (raw.astype(numpy.uint32) << 16).view(numpy.float32) if tensor.dtype == "BF16" else raw
    if not numpy.isfinite(values).all():
        raise WeightsError(f"{tensor.file}: {tensor.name} has values that are not finite numbers")
    return values.astype(numpy.float32)


class InitialAdapter:
    """The adapter that a job begins with (`train.lora.from`)."""

    def __init__(self, spec: JobSpec, lora: LoraConfig):
        """Raises WeightsError if it does not fit."""
        self._modules, self._rank = adapter_of(spec.model, lora), lora.rank

    def values(self, name: str) -> numpy.ndarray:
        """One of our matrices A and B, as a whole, by its name in the model. Raises WeightsError."""
        matrix, _, end = name.rpartition(".")
        module = self._modules[matrix]
        a, b = _values(module.a), _values(module.b)
        used = [each for each in module.module.matrices if each in self._modules]
        for each in module.module.matrices:
            first, last = module.rows_of(each)
            others = b[first:last].copy()
            if each in used:
                others[:, self._columns(module, used.index(each))] = 0
            if others.any():
                raise WeightsError(
                    f"{module.b.file}: {module.b.name} of rank {module.rank} is not one block of rank {self._rank} for "
                    f"each of {', '.join(target_of(name) for name in used)}, as train.lora requires"
                )
        columns, (first, last) = self._columns(module, used.index(matrix)), module.rows_of(matrix)
        return a[columns] if end == "lora_a" else b[first:last, columns]

    def _columns(self, module: PeftModule, place: int) -> slice:
        """Columns of B that belong to one of the matrices of a layer of theirs: all, unless each has its own."""
        if module.rank == self._rank:
            return slice(0, module.rank)
        return slice(place * self._rank, (place + 1) * self._rank)
