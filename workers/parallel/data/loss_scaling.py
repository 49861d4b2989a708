"""Dynamic loss scaling for fp16 (Micikevicius et al., arXiv:1710.03740, section 3.2): halved when a gradient
overflows, doubled after many steps without."""

from __future__ import annotations

import torch

INITIAL = 2.0**16
GROWTH_STEPS = 1000


class LossScale:
    """The factor on the loss; always 1 if the precision needs none. For fp16 (Micikevicius et al., arXiv:1710.03740,
    section 3.2) it is dynamic: halved when a gradient overflows, doubled after many steps without."""

    def __init__(self, dynamic: bool):
        self.dynamic = dynamic
        # A tensor, since it is part of the state that snapshots and checkpoints keep: (scale, good steps since).
        self.state = torch.empty(2, dtype=torch.float32)
        self.forget()

    def forget(self) -> None:
        """Back to the state before the first step."""
        self.state[0], self.state[1] = INITIAL if self.dynamic else 1.0, 0.0

    @property
    def value(self) -> float:
        """The factor of the next step; a power of two."""
        return float(self.state[0])

    def after_finite(self) -> None:
        """The gradients of a step were finite."""
        if self.dynamic:
            self.state[1] += 1
            if self.state[1] >= GROWTH_STEPS:
                self.state[0] *= 2.0
                self.state[1] = 0.0

    def after_overflow(self) -> bool:
        """A step's gradients were not finite. Returns whether to repeat it with a smaller factor, which may help."""
        if not self.dynamic or self.value <= 1.0:
            return False
        self.state[0] /= 2.0
        self.state[1] = 0.0
        return True
