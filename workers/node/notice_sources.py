"""Who is asked whether a machine is to be taken away: the value of `MANTA_NODE_NOTICES` as objects."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from manta.workers.errors import MantaError
from manta.workers.node.cloud_notices import CLOUDS, SERVICES, MetadataSource
from manta.workers.node.kubernetes_notices import KubernetesSource
from manta.workers.node.notices import Notice, NoticeSource, SourceUnavailable
from manta.workers.settings import read_slurm_job_end

LEAD_SECONDS = 600.0
"""The end is announced when it is this near."""


@dataclass(frozen=True)
class SlurmSource:
    """The Slurm job in which Ray was started. Slurm tells all its processes when it begins how long it may last.

    Slurm also sends a signal, before the end if `--signal` requests it, and at the end: it reaches Ray's processes too,
    which end at once.
    """

    lead_seconds: float = LEAD_SECONDS
    """How long before its end the node is to be drained."""
    name: str = "slurm"

    @classmethod
    def of(cls, text: str) -> SlurmSource:
        """From the seconds, or the default if `text` is empty. Raises ValueError."""
        seconds = float(text) if text else LEAD_SECONDS
        if not 0 <= seconds < float("inf"):
            raise ValueError(text)
        return cls(seconds)

    def notice(self, now: datetime) -> Notice | None:
        """A notice if the job reaches its time limit soon, otherwise None. Raises SourceUnavailable."""
        end = read_slurm_job_end()
        if end is None:
            raise SourceUnavailable("SLURM_JOB_END_TIME is not set: Ray was not started in a Slurm job on this machine")
        left = end - now.astimezone(UTC).timestamp()
        if left > self.lead_seconds:
            return None
        return Notice(f"end {end:.0f}", max(0.0, left), "the Slurm job reaches its time limit")


class UnknownSource(MantaError):
    """The text contains an unknown source of notices."""


def notice_sources(text: str) -> list[NoticeSource]:
    """The sources that `text` names, separated by commas; none is asked yet. Raises UnknownSource."""
    return [_source(each.strip()) for each in text.split(",")]


def _source(text: str) -> NoticeSource:
    name, _, about = text.partition("=")
    try:
        if name in CLOUDS and (not about or urlsplit(about).scheme == "http"):
            return MetadataSource(name, about or SERVICES[name])
        if name == "kubernetes":
            return KubernetesSource.of(about)
        if name == "slurm":
            return SlurmSource.of(about)
    except ValueError as error:
        raise UnknownSource(_problem(text)) from error
    raise UnknownSource(_problem(text))


def _problem(text: str) -> str:
    return (
        f"{text!r} is not a known source of notices: use {', '.join(CLOUDS)}, CLOUD=http://HOST:PORT, kubernetes, "
        "kubernetes=TAINT+TAINT:SECONDS, slurm or slurm=SECONDS, several with commas"
    )
