"""Modes by which tests see what torch is asked for, without torch's compiler.

By default torch keeps each call of a mode from being compiled, which takes as long as the call, and for the first one
it imports the compiler, which takes seconds.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A base of other modes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FakeMode(FakeTensorMode):
    """Within the block tensors have no memory."""

    __torch_dispatch__ = FakeTensorMode.__torch_dispatch__.__wrapped__

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
