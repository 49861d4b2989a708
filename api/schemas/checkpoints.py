"""What is kept of a job on disk, and written for others."""

from __future__ import annotations

from typing import Literal

from api.schemas.base import Answer, Time


class Checkpoint(Answer):
    """One durable checkpoint."""

    id: str
    """Its id."""
    step: int
    """Committed step whose state it holds."""
    state: str
    """saving, complete, failed or deleted."""
    path: str
    """Its folder."""
    bytes: int | None
    """Size on disk, once complete."""
    created_at: Time
    """When its saving began."""
    generation: int | None = None
    """Generation that saved it."""
    exists: bool | None = None
    """Whether its files are there, as far as is known; null while it is being saved."""
    age_seconds: float | None = None
    """Since it was complete; null for others."""
    kept_because: str | None = None
    """Why it is not deleted when the next one is complete, in a sentence; null where that is not known."""


class Export(Answer):
    """Weights of a checkpoint that are written for others, or were."""

    id: str
    """Its id."""
    job: str
    """Job id."""
    checkpoint: str
    """Id of the checkpoint, which may be gone."""
    to: str
    """Folder on the machine of the service that was asked."""
    format: str
    """hf or safetensors."""
    dtype: str | None
    """Of the numbers; null: that of the weights that the job began with, or fp32."""
    state: Literal["running", "done", "failed"]
    """The folder is there as a whole once it is done, and else not at all."""
    message: str | None
    """Why it failed."""
    done_bytes: int
    """Written so far."""
    total_bytes: int | None
    """Of all tensors; null before that is known."""
    created_at: Time
    """When it began."""
