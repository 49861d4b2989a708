"""The tables of traces: single steps of jobs, recorded action by action."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from service.store.tables import Base
from service.store.types import AnyText, Document, Real


class StepTrace(Base):
    """A trace, from its request on."""

    __tablename__ = "step_traces"
    __table_args__ = (Index(None, "state"),)

    job_id: Mapped[str] = mapped_column(String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    """The job."""
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Number of the trace within the job, from 1; none is reused."""
    state: Mapped[str] = mapped_column(String(16))
    """requested, recording, complete, partial or failed."""
    message: Mapped[str | None] = mapped_column(AnyText)
    """Why it is partial, has failed, or does not begin."""
    steps: Mapped[int]
    """Number of requested steps."""
    wanted_step: Mapped[int] = mapped_column(BigInteger)
    """The first step is not before this one; 0: as soon as possible."""
    profiler_ranks: Mapped[list[int]] = mapped_column(Document, default=list)
    """Ranks whose steps torch's profiler records too."""
    generation: Mapped[int | None]
    """Of the ranks that record it; null before they begin, like the following ones."""
    first_step: Mapped[int | None] = mapped_column(BigInteger)
    """The first recorded step."""
    parallel: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """The layout at that time."""
    nodes: Mapped[list[str | None] | None] = mapped_column(Document)
    """The node of each rank."""
    slices: Mapped[int] = mapped_column(BigInteger, default=0)
    """Number of slices stored so far."""
    requested_at: Mapped[float] = mapped_column(Real)
    """When it was requested."""
    finished_at: Mapped[float | None] = mapped_column(Real)
    """When it ended."""


class StepTracePart(Base):
    """What one rank has recorded for a trace."""

    __tablename__ = "step_trace_parts"

    job_id: Mapped[str] = mapped_column(String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    """The job."""
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The trace's number."""
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The rank."""
    recording: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """A `PackedRecording`; null if only the profile has arrived."""
    profile: Mapped[bytes | None] = mapped_column(LargeBinary)
    """The profile of torch's profiler, as a Chrome trace, compressed with gzip."""
