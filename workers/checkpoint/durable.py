"""Durable checkpoints by torch.distributed.checkpoint, in a format that does not know the layout.

Every element of the parameters and of both moments is written once, as a rectangle of its layout-free tensor
(`model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`), so torch's own readers, and any other layout, can load it. DCP's
files, `.metadata` included, are summed while they are written and checked while they are read.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from workers.checkpoint.catalog import Manifest, manifest_of
from workers.checkpoint.checksums import DamagedCheckpoint, FileSums, SummingFile, checked, damaged
from workers.checkpoint.rectangles import Rectangle
from workers.comm.shared_work import SharedWork
from workers.errors import CheckpointError

KINDS = ("model", "exp_avg", "exp_avg_sq")

Views = dict[MetadataIndex, torch.Tensor]


def _index(kind: str, rectangle: Rectangle) -> MetadataIndex:
    return MetadataIndex(f"{kind}.{rectangle.name}", torch.Size(rectangle.offsets))


def save(
    path: str, rectangles: list[Rectangle], parts: dict[str, torch.Tensor], ranks: SharedWork
) -> dict[str, FileSums]:
    """Write this rank's `rectangles` of each part in `parts` (by KINDS, CPU tensors) below `path`, together with all
    `ranks`. On rank 0 what comes back are the sums of all files of all ranks.

    Raises what the file system raised or, where there are several ranks, SharedWorkFailed on each of them.
    """
    files = _SummingFiles()
    writer = dcp.FileSystemWriter(path, sync_files=True)
    writer.fs = files
    planner = _RectangleSavePlanner(rectangles, parts)
    catalogue: list[Metadata] = []

    def plan() -> SavePlan:
        writer.set_up_storage_writer(ranks.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def combine_plans(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        catalogue.append(metadata)
        return writer.prepare_global_plan(plans)

    def write() -> tuple[list[WriteResult], dict[str, FileSums]]:
        written = writer.write_data(planner.finish_plan(mine), planner)
        written.wait()
        return written.value(), files.sums

    def finish(results: list[tuple[list[WriteResult], dict[str, FileSums]]]) -> list[dict[str, FileSums]]:
        writer.finish(catalogue[0], [written for written, _ in results])
        together = {name: each for _, sums in results for name, each in sums.items()}
        return [together | files.sums, *({} for _ in results[1:])]

    mine = ranks.together(plan, combine_plans)
    return ranks.together(write, finish)


def load(path: str, rectangles: list[Rectangle], length: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """What the checkpoint at `path` holds of `rectangles`, in new parts of `length` elements (by KINDS, on the CPU;
    zero where no rectangle lies), and its manifest. Each rank reads what it needs by itself.

    Every byte that is used is checked as it is read: the manifest, `.metadata`, and of the data files those blocks
    (4 MiB) in which something lies that the rank needs. That costs a CRC-32 of them, 0.3 s a GB, and no reading of
    its own; what only other ranks need is left to them.

    Raises DamagedCheckpoint naming file and byte, CheckpointError when it holds another model or cannot be read.
    """
    manifest = manifest_of(Path(path))
    parts = {kind: torch.zeros(length) for kind in KINDS}
    reader = _CheckingReader(path, manifest)
    try:
        metadata = reader.read_metadata()
        planner = _RectangleLoadPlanner(path, rectangles, parts, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    except CheckpointError:
        raise
    except Exception as error:
        kind = DamagedCheckpoint if manifest.blocks is None else CheckpointError
        raise kind(f"the checkpoint at {path} cannot be read: {_sentence(error)}") from error
    return manifest, parts


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _SummingFiles(FileSystem):
    """Files that are summed while they are written."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSums] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """A new file; its sums are known once it is closed."""
        if mode != "wb":
            raise ValueError(f"{path} is to be written, not opened as {mode}")
        raw = SummingFile(Path(path))
        with io.BufferedWriter(raw, buffer_size=1024 * 1024) as stream:
            yield stream
        self.sums[Path(path).name] = raw.sums

    def rename(self, path: Any, new_path: Any) -> None:
        """As any rename."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _CheckedFiles(FileSystem):
    """The files of a checkpoint, checked while they are read."""

    def __init__(self, manifest: Manifest):
        self._manifest = manifest

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """One file. What goes wrong with its content names it."""
        file = Path(path)
        with checked(file, self._manifest.sums(file)) as stream:
            try:
                yield stream
            except CheckpointError:
                raise
            except Exception as error:
                if self._manifest.blocks is None:  # nobody has looked at these bytes before
                    raise damaged(file, f"makes no sense at byte {stream.tell()} ({_sentence(error)})") from None
                raise CheckpointError(f"{file} is as it was written, but cannot be read: {_sentence(error)}") from error


class _CheckingReader(dcp.FileSystemReader):
    """Reads what was checked, and each file from its beginning to its end, so that each block is read once.

    It is used without `dcp.load`, which logs tracebacks of what it cannot read and goes on without.
    """

    def __init__(self, path: str, manifest: Manifest):
        super().__init__(path)
        self.fs = _CheckedFiles(manifest)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The catalogue of all rectangles."""
        with self.fs.create_stream(Path(self.path) / ".metadata", "rb") as stream:
            metadata = pickle.load(stream)
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds a {type(metadata).__name__}")
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan in the order of what is on disk."""
        return replace(plan, items=sorted(plan.items, key=self._place))

    def _place(self, item: ReadItem) -> tuple[str, int]:
        stored = self.storage_data[item.storage_index]
        return stored.relative_path, stored.offset


class _RectangleSavePlanner(SavePlanner):
    """Writes rectangles; needs no state dict."""

    def __init__(self, rectangles: list[Rectangle], parts: dict[str, torch.Tensor]):
        self._rectangles, self._parts = rectangles, parts
        self._views: Views = {_index(kind, p): p.view(part) for kind, part in parts.items() for p in rectangles}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to keep: the rectangles were given."""

    def create_local_plan(self) -> SavePlan:
        """One write a rectangle."""
        return SavePlan([self._item(kind, rectangle) for kind in self._parts for rectangle in self._rectangles])

    def _item(self, kind: str, rectangle: Rectangle) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(rectangle.offsets), torch.Size(rectangle.sizes))
        properties = TensorProperties(dtype=self._parts[kind].dtype)
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(rectangle.shape))
        return WriteItem(index=_index(kind, rectangle), type=WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The catalogue of all ranks' rectangles."""
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None
            entry = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            entry.chunks.append(data.chunk)
        return all_plans, Metadata(state_dict_metadata=dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The rectangle's elements."""
        return self._views[write_item.index].contiguous()


class _RectangleLoadPlanner(LoadPlanner):
    """Reads the parts of stored rectangles that fall into this rank's."""

    def __init__(self, path: str, rectangles: list[Rectangle], parts: dict[str, torch.Tensor], metadata: Metadata):
        self._path, self._rectangles, self._parts, self._metadata = path, rectangles, parts, metadata
        self._views: Views = {_index(kind, p): p.view(part) for kind, part in parts.items() for p in rectangles}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Nothing to keep: the catalogue was given."""

    def create_local_plan(self) -> LoadPlan:
        """All overlaps of wanted and stored rectangles. Raises CheckpointError when a wanted element is not there."""
        return LoadPlan(
            [read for kind in self._parts for rectangle in self._rectangles for read in self._reads(kind, rectangle)]
        )

    def _reads(self, kind: str, rectangle: Rectangle) -> list[ReadItem]:
        index = _index(kind, rectangle)
        stored = self._metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != rectangle.shape:
            shape = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else "nothing"
            raise CheckpointError(
                f"the checkpoint at {self._path} is of another model: {index.fqn} should be {rectangle.shape}, "
                f"found {shape}"
            )
        reads = []
        for chunk in stored.chunks:
            low = [max(a, b) for a, b in zip(rectangle.offsets, chunk.offsets, strict=True)]
            ends = zip(rectangle.offsets, rectangle.sizes, chunk.offsets, chunk.sizes, strict=True)
            lengths = [min(a + m, b + n) - start for start, (a, m, b, n) in zip(low, ends, strict=True)]
            if min(lengths) > 0:
                reads.append(
                    ReadItem(
                        type=LoadItemType.TENSOR,
                        dest_index=index,
                        dest_offsets=torch.Size(a - b for a, b in zip(low, rectangle.offsets, strict=True)),
                        storage_index=MetadataIndex(index.fqn, chunk.offsets),
                        storage_offsets=torch.Size(a - b for a, b in zip(low, chunk.offsets, strict=True)),
                        lengths=torch.Size(lengths),
                    )
                )
        if sum(math.prod(read.lengths) for read in reads) != math.prod(rectangle.sizes):
            raise CheckpointError(f"the checkpoint at {self._path} does not hold all of {index.fqn}")
        return reads

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never asked for: nothing is stored as bytes."""
        raise CheckpointError(f"the checkpoint at {self._path} holds an unknown entry {read_item.dest_index.fqn}")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where the read lands."""
        view = self._views[read_item.dest_index]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Read in place already."""
