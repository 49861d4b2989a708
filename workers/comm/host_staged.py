"""Communicates device tensors through a backend for host memory: for several ranks on one GPU, which NCCL does not
support."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.comm.backend import Backend, Handle, Started, Tensors, Transfer
from workers.comm.grid import Axis


class HostStaged:
    """Does what `hosts` does, on copies in host memory."""

    def __init__(self, hosts: Backend):
        self._hosts = hosts

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool) -> Handle:
        host = tensor.cpu()
        return _copied_back(self._hosts.start_all_reduce(axis, host, largest), [tensor], [host])

    def start_all_gather(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        host = _host_like(out)
        return _copied_back(self._hosts.start_all_gather(axis, host, tensor.cpu()), [out], [host])

    def start_reduce_scatter(self, axis: Axis, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        host = _host_like(out)
        return _copied_back(self._hosts.start_reduce_scatter(axis, host, tensor.cpu()), [out], [host])

    def start_all_to_all(self, axis: Axis, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Handle:
        sent = [[tensor.cpu() for tensor in tensors] for tensors in outgoing]
        received = [[_host_like(tensor) for tensor in tensors] for tensors in incoming]
        work = self._hosts.start_all_to_all(axis, sent, received)
        return _copied_back(work, _flat(incoming), _flat(received))

    def send(self, stage: int, tensor: torch.Tensor) -> Transfer:
        return self._hosts.send(stage, tensor.cpu())

    def receive(self, stage: int, tensor: torch.Tensor) -> Handle:
        host = _host_like(tensor)
        return _copied_back(self._hosts.receive(stage, host), [tensor], [host])

    def interrupt(self) -> None:
        self._hosts.interrupt()

    def confirm(self) -> None:
        self._hosts.confirm()

    def close(self) -> None:
        self._hosts.close()


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _flat(lists: Sequence[Tensors]) -> list[torch.Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _copied_back(work: Handle, tensors: Tensors, hosts: Tensors) -> Started:
    """`work`, after which `hosts` are copied into `tensors`."""

    def copy() -> None:
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host)

    return Started([work], copy)
