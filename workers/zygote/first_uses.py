"""What torch imports only on first use: for a device, in a backward, in a save. Each of a zygote's children would
import it again, taking half a second in its first step."""

from __future__ import annotations

import contextlib
import importlib

MODULES = ("torch.utils._device", "torch.fx.experimental.symbolic_shapes", "torch.utils.serialization.config")


def import_them() -> None:
    """Import them now. They are internal to torch: a release that lacks one does without it."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
