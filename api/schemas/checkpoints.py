"""A job's durable checkpoints, and exports of their weights."""

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
    """Whether its files exist, as far as is known; null while it is being saved."""
    age_seconds: float | None = None
    """Seconds since it was complete; null unless it is."""
    kept_because: str | None = None
    """Why it is not deleted when the next one is complete, in a sentence; null where that is not known."""


class Export(Answer):
    """An export of a checkpoint's weights."""

    id: str
    """Its id."""
    job: str
    """Job id."""
    checkpoint: str
    """Id of the checkpoint, which may have been deleted since."""
    to: str
    """Folder on the machine of the service that took the request."""
    format: str
    """hf or safetensors."""
    dtype: str | None
    """Data type of the weights; null: that of the weights that the job began with, or fp32."""
    state: Literal["running", "done", "failed"]
    """The folder appears once the export is done, complete."""
    message: str | None
    """Why it failed."""
    done_bytes: int
    """Bytes written so far."""
    total_bytes: int | None
    """Bytes of all tensors; null before that is known."""
    created_at: Time
    """When it began."""
