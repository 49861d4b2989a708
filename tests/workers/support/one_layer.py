"""One rank of a layout by itself: what its autograd holds, and which products it computes.

The other ranks are not there: collectives return tensors of the right shape at once, and messages arrive empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dispatch_mode import DispatchMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.support.faked_comm import FakedComm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.data.batches import Documents
from manta.workers.model.families import parts_of
from manta.workers.model.shared import Shared
from manta.workers.parallel.data.flat import FlatParameters
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute import Recompute
from manta.workers.parallel.recompute.modules import checkpointed
from manta.workers.parallel.tensor.dropout import sample_keys
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.parallel.tensor.sequence_parallel import Region
from manta.workers.parallel.tensor.shards import named_shards

CPU = torch.device("cpu")


class _Arrived:
    """A message that is there."""

    done = True

    def wait(self) -> None:
        """Return at once."""


class LoneRank(FakedComm):
    """A rank whose peers send whatever lies in the memory."""

    def send(self, stage: int, tensor: torch.Tensor) -> Any:
        """Nobody receives it."""
        return _Arrived()

    def receive(self, stage: int, tensor: torch.Tensor) -> Any:
        """Zeros."""
        tensor.zero_()
        return _Arrived()


def lone_rank(spec: JobSpec, rank: int = 0) -> LoneRank:
    """`rank` of the layout of `spec`."""
    return LoneRank(RankGrid(spec.layout), rank, CPU)


class OneLayer:
    """Layer 0 of a job on tensor rank 0, with parameters in the job's precision."""

    def __init__(self, spec: JobSpec):
        self.spec, self.comm = spec, lone_rank(spec)
        layout = spec.layout
        region = Region(self.comm, layout.sequence_parallel_on, TorchProducts(), layout.forward_chunks)
        self.layer = parts_of(spec.model).layer(Shared(spec, region), 0)
        self.dtype = getattr(torch, spec.train.dtype)
        self.flat = FlatParameters(named_shards(self.layer), 1, CPU, self.dtype)
        self.flat.parameters.normal_(0.0, 0.02)
        self.keys: torch.Tensor | None = None
        """Dropout keys of the micro-batch, which all layers share."""
        keys = sample_keys(0, range(spec.train.micro_batch_size), CPU)
        if spec.model.dropout > 0:
            self.keys = keys
        self.adapter_keys = keys if spec.train.lora is not None and spec.train.lora.dropout > 0 else None

    def input(self) -> torch.Tensor:
        """A full micro-batch: [s or s/t, b, h]."""
        model, layout = self.spec.model, self.spec.layout
        split = layout.tensor if layout.sequence_parallel_on else 1
        shape = (model.sequence_length // split, self.spec.train.micro_batch_size, model.hidden_size)
        return torch.randn(shape, dtype=self.dtype)

    def forward(self, x: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """The layer under the layout's policy, as a chunk runs it."""
        positions, recompute = Positions.of(self.spec.model.sequence_length), Recompute.of(self.spec.layout)
        run = ForwardPass(positions, self.keys, recompute, documents=documents, adapter_keys_b=self.adapter_keys)
        return checkpointed(self.comm, self.layer, x, run) if run.recompute.full_layer(0) else self.layer(x, run)


class _Births(DispatchMode):
    """Weak references to every storage that operations see, with its bytes where an operation has made it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), born=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, born=True)
        return result

    def _note(self, values: Any, born: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                # The weak reference keeps the address from being used again.
                self.storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes() if born else 0))


def held_tensors(forward: Callable[[], torch.Tensor]) -> tuple[list[int], GradientEdge]:
    """Bytes of each storage that was made in `forward` and is still alive once nobody has its result: what backward
    needs, whoever holds it. Parameters were there before. Also where backward begins, which is what holds them."""
    births = _Births()
    with births:
        edge = get_gradient_edge(forward())
    return [size for storage, size in births.storages.values() if size and not storage.expired()], edge


def held_bytes(forward: Callable[[], torch.Tensor]) -> tuple[int, GradientEdge]:
    """The sum of `held_tensors`."""
    sizes, edge = held_tensors(forward)
    return sum(sizes), edge


class FlopCounter(DispatchMode):
    """FLOPs by torch's formulas, and of what those do not know: the product that is added in place, and CPUs' attention
    kernel. torch's own mode keeps them by module, which takes longer than what is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_FURTHER_FORMULAS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _added_product(_: Any, left: list[int], right: list[int], out_shape: Any = None, **scales: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _attention(q: Any, k: Any, v: Any, *options: Any, out_shape: Any = None, **more: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *options: Any, out_shape: Any = None, **more: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


_FURTHER_FORMULAS = {
    torch.ops.aten.addmm_: _added_product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
