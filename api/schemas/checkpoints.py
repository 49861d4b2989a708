"""Checkpoints of a job, and exports of their weights."""

from __future__ import annotations

from typing import Literal

from api.schemas.base import Answer, Time


class Checkpoint(Answer):
    """One durable checkpoint."""

    id: str
    """Id."""
    step: int
    """Committed step whose state it contains."""
    state: str
    """saving, complete, failed or deleted."""
    path: str
    """Folder of the checkpoint."""
    bytes: int | None
    """Size on disk; null until it is complete."""
    created_at: Time
    """When the save began."""
    generation: int | None = None
    """Generation that saved it."""
    exists: bool | None = None
    """Whether its files exist, as far as known; null while it is being saved."""
    age_seconds: float | None = None
    """Time since it was completed; null if it is not complete."""
    kept_because: str | None = None
    """Why it is not deleted when the next one is complete, as a sentence; null if unknown."""


class Export(Answer):
    """An export of a checkpoint's weights to another format."""

    id: str
    """Id."""
    job: str
    """Job id."""
    checkpoint: str
    """Id of the checkpoint, which may have been deleted since."""
    to: str
    """Folder on the machine of the service that received the request."""
    format: str
    """hf or safetensors."""
    dtype: str | None
    """Number format; null: that of the weights that the job started from, or fp32."""
    state: Literal["running", "done", "failed"]
    """The folder appears when it is complete, in state done."""
    message: str | None
    """Why it failed."""
    done_bytes: int
    """Bytes written so far."""
    total_bytes: int | None
    """Bytes of all tensors; null until known."""
    created_at: Time
    """When the export began."""
