"""The shared secret of the ranks of one generation, and the proof of knowing it. Pure Python."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field

SECRET_LENGTH = 64
"""Characters of a generation's secret: 256 random bits as hexadecimal digits."""
PROOF_BYTES = 64


@dataclass(frozen=True)
class Secret:
    """The secret of one generation, for one purpose. Ranks never send it; they send proofs."""

    value: str = field(repr=False)
    generation: int
    purpose: str
    """A proof for one purpose is not valid for another."""

    def __post_init__(self) -> None:
        if len(self.value) < SECRET_LENGTH:
            raise ValueError(f"the secret of a generation has {SECRET_LENGTH} characters, not {len(self.value)}")

    def proof(self, *statement: str | int) -> bytes:
        """PROOF_BYTES that only an owner of the secret can compute, valid for `statement` only."""
        text = json.dumps([self.purpose, self.generation, *statement])  # different statements have different texts
        return hmac.new(self.value.encode(), text.encode(), "sha256").hexdigest().encode()

    def proves(self, proof: bytes, *statement: str | int) -> bool:
        """Whether `proof` is that of `statement`. The time that it takes reveals nothing about the right proof."""
        return hmac.compare_digest(proof, self.proof(*statement))
