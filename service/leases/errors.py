"""Why a control plane may not do what it was about to."""

from __future__ import annotations

from workers.errors import MantaError


class LeaseLost(MantaError):
    """Another control plane looks after it by now, or nobody; leave it alone."""

    def __init__(self, name: str):
        """`name`: of the lease."""
        self.name = name
        super().__init__(f"{name} is not looked after by this control plane any more")


class LeaseUncertain(MantaError):
    """The time until which this control plane looks after it may be over: give no order before that is known."""

    def __init__(self, name: str):
        """`name`: of the lease."""
        self.name = name
        super().__init__(f"it is not certain that this control plane still looks after {name}: the database is away")


class OtherRay(MantaError):
    """Control planes of one database must use one Ray."""

    def __init__(self, place: str, theirs: str, ours: str):
        """`place`: of the other one; the rest: which Ray each of them uses."""
        super().__init__(
            f"a control plane on this database runs already at {place}, and uses another Ray ({theirs}, here {ours}): "
            "end it, or start this one with --ray and the address of that Ray (docs/operations.md, Several control "
            "planes)"
        )
