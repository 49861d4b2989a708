"""How large the tensors are that something makes."""

from __future__ import annotations

from typing import Any

import torch
from dispatch_mode import DispatchMode


class MadeTensors(DispatchMode):
    """Within the block new tensors are looked at; views are of what was there."""

    most = 0
    """Elements of the largest one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.most = max(self.most, result.numel())
        return result
