"""A rank's parameters from a folder of Hugging Face weights, of which it reads the rows and columns that it holds.

In addition to the rank's own state, at most one of its parameters, as fp32, and one block of a tensor's rows, as in the
file, are in memory. The library `safetensors` maps the files into memory, one tensor at a time; nothing in them is
executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from manta.workers.config import JobSpec, LoraConfig
from manta.workers.data.read_errors import is_of_the_storage, weights_error
from manta.workers.errors import WeightsError
from manta.workers.parallel.tensor.shards import NamedShard, fill_initial
from manta.workers.spec.layer_table import is_adapter
from manta.workers.weights.adapters import InitialAdapter
from manta.workers.weights.folder import ExpertPart, FileTensor, predicting_layers, read_headers, tensors_of
from manta.workers.weights.mapping import ROUTER_BIAS, HuggingFaceTensor, Piece, huggingface_tensors, uses_of

BLOCK_BYTES = 64 * 2**20
"""The most that is read of a tensor at a time, unless a row is larger."""


class Weights:
    """The weights that a job begins with."""

    def __init__(self, spec: JobSpec, moved: Callable[[], object] = lambda: None):
        """`moved` is called whenever some of the weights have been read. Raises WeightsError if they are not what the
        model needs."""
        folder = Path(spec.model.from_ or "")
        headers = read_headers(folder)
        self._at = tensors_of(spec, headers)
        self._moved = moved
        left_out = ", ".join(each.rstrip(".") for each in predicting_layers(spec.model, headers))
        self.notice = f"{folder}: {left_out}, for predicting several tokens, is left out" if left_out else ""
        """What is in the folder but not in the model, in a sentence; empty if nothing is."""
        self._parts = uses_of(huggingface_tensors(spec))
        self._seed = spec.train.seed

    def fill(self, entry: NamedShard, local: torch.Tensor) -> None:
        """Put the part of a parameter that the rank holds into `local`, of its shape; of an adapter, which the folder
        does not have, the initial values. Raises WeightsError."""
        if is_adapter(entry.name):
            fill_initial(entry, local, self._seed)
            return
        rows, columns = entry.shard.rows_and_columns(tuple(local.shape))
        local[max(0, rows[1] - rows[0]) :].zero_()  # rows of a padded vocabulary
        self._fill(entry.name, rows, columns, local.view(local.shape[0], -1))

    def fill_router_bias(self, local: torch.Tensor) -> None:
        """Put what is added to the scores of experts for their choice into `local`, fp32 [layers with experts, E].
        Raises WeightsError."""
        if ROUTER_BIAS in self._parts:
            values = torch.empty(local.numel(), 1)
            self._fill(ROUTER_BIAS, (0, len(values)), (0, 1), values)
            local.copy_(values.view_as(local))

    def _fill(self, name: str, rows: tuple[int, int], columns: tuple[int, int], local: torch.Tensor) -> None:
        pieces: dict[HuggingFaceTensor, list[Piece]] = {}
        for tensor, piece in self._parts[name]:
            pieces.setdefault(tensor, []).append(piece)
        for tensor, some in pieces.items():
            self._read(tensor, some, rows, columns, local)

    def _read(
        self,
        tensor: HuggingFaceTensor,
        pieces: Sequence[Piece],
        rows: tuple[int, int],
        columns: tuple[int, int],
        local: torch.Tensor,
    ) -> None:
        """The pieces' part of our [rows, columns), which are `local`; read in the order of their rows, of which some
        pieces have every n-th."""
        here = self._at[tensor.name]
        in_order = sorted((run for piece in pieces for run in piece.runs(*rows)), key=lambda run: run[1])
        try:
            with safe_open(here.file, framework="pt") as file:
                stored = file.get_slice(here.name)
                for runs in _blocks(in_order, _rows_in_a_block(tensor)):
                    first, end = runs[0][1], runs[-1][1] + runs[-1][2]
                    block = _cut(stored, tensor, (first, end), columns, here.of_expert)
                    for row, theirs, count in runs:
                        at = row - rows[0]
                        local[at : at + count, : block.shape[1]].copy_(block[theirs - first : theirs - first + count])
                    self._moved()
        except (SafetensorError, OSError) as error:
            raise _unreadable(here, error) from error


Fill = Callable[[NamedShard, torch.Tensor], None]
"""Puts initial values of a rank's part of a parameter into memory of its shape."""


def with_adapter(spec: JobSpec, lora: LoraConfig, others: Fill) -> Fill:
    """Initial values of adapters from the folder that they begin with, and of `others`. Raises WeightsError if the
    adapters do not fit, as what it returns does."""
    adapter = InitialAdapter(spec, lora)

    def fill(entry: NamedShard, local: torch.Tensor) -> None:
        if not is_adapter(entry.name):
            others(entry, local)
            return
        (first, end), (left, right) = entry.shard.rows_and_columns(tuple(local.shape))
        local.copy_(torch.from_numpy(adapter.values(entry.name)[first:end, left:right]))

    return fill


def _rows_in_a_block(tensor: HuggingFaceTensor) -> int:
    columns = 1 if len(tensor.shape) == 1 else tensor.rows_first[1]
    return max(1, BLOCK_BYTES // (4 * columns))


def _blocks(runs: Iterable[tuple[int, int, int]], max_rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """The runs, cut if they are longer than `max_rows` rows, in groups that are consecutive in their tensor and have
    about `max_rows` rows."""
    group: list[tuple[int, int, int]] = []
    for row, theirs, count in runs:
        for start in range(0, count, max_rows):
            run = row + start, theirs + start, min(max_rows, count - start)
            if group and (run[1] + run[2] - group[0][1] > max_rows or run[1] != group[-1][1] + group[-1][2]):
                yield group
                group = []
            group.append(run)
    if group:
        yield group


def _cut(
    stored: object,
    tensor: HuggingFaceTensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
    part: ExpertPart | None,
) -> torch.Tensor:
    """Rows and columns, in our order, of a slice of their tensor, or of one expert's `part` of it: [rows, columns]."""
    a, b, c, d = *rows, *columns
    if part is not None:
        a, b = a + part.first_row, b + part.first_row
        if part.transposed:
            return stored[part.expert, c:d, a:b].t()  # type: ignore[index]
        return stored[part.expert, a:b, c:d]  # type: ignore[index]
    if len(tensor.shape) == 1:
        return stored[a:b].view(-1, 1)  # type: ignore[index]
    if tensor.transposed:
        return stored[c:d, a:b].t()  # type: ignore[index]
    return stored[a:b, c:d]  # type: ignore[index]


def _unreadable(here: FileTensor, error: Exception) -> WeightsError:
    if isinstance(error, OSError) and is_of_the_storage(error):
        return weights_error(here.file, error)
    return WeightsError(f"{here.file}: {here.name} cannot be read: {' '.join(str(error).split())}")
