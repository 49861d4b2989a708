"""Errors of a control plane that does not, or not certainly, hold a lease."""

from __future__ import annotations

from workers.errors import MantaError


class LeaseLost(MantaError):
    """Another control plane owns it by now, or none; leave it alone."""

    def __init__(self, name: str):
        """`name`: of the lease."""
        self.name = name
        super().__init__(f"{name} is no longer owned by this control plane")


class LeaseUncertain(MantaError):
    """The time until which this control plane owns it may be over: send no order before that is known."""

    def __init__(self, name: str):
        """`name`: of the lease."""
        self.name = name
        super().__init__(f"it is not certain that this control plane still owns {name}: the database does not answer")


class OtherRay(MantaError):
    """Control planes of one database must use one Ray."""

    def __init__(self, place: str, theirs: str, ours: str):
        """`place`: of the other one; the rest: which Ray each of them uses."""
        super().__init__(
            f"a control plane on this database runs already at {place}, and uses another Ray ({theirs}, here {ours}): "
            "end it, or start this one with --ray and the address of that Ray (docs/operations.md, Several control "
            "planes)"
        )
