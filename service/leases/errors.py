"""Errors of a control plane that does not, or not certainly, hold a lease."""

from __future__ import annotations

from workers.errors import MantaError


class LeaseLost(MantaError):
    """Another control plane, or none, owns it now; do not touch it."""

    def __init__(self, name: str):
        """`name`: the lease's name."""
        self.name = name
        super().__init__(f"{name} is no longer owned by this control plane")


class LeaseUncertain(MantaError):
    """The time until which this control plane owns it may be over: send no order until that is known."""

    def __init__(self, name: str):
        """`name`: the lease's name."""
        self.name = name
        super().__init__(f"it is not certain that this control plane still owns {name}: the database does not answer")


class OtherRay(MantaError):
    """Control planes of one database must use one Ray."""

    def __init__(self, place: str, theirs: str, ours: str):
        """`place`: where the other one runs; `theirs`, `ours`: the Ray that each of them uses."""
        super().__init__(
            f"a control plane on this database runs already at {place}, and uses another Ray ({theirs}, here {ours}): "
            "end it, or start this one with --ray and the address of that Ray (docs/operations.md, Several control "
            "planes)"
        )
