"""Who is asked whether a machine is to be taken away: the value of `MANTA_NODE_NOTICES` as objects."""

from __future__ import annotations

from urllib.parse import urlsplit

from workers.errors import MantaError
from workers.node.cloud_notices import CLOUDS, SERVICES, MetadataSource
from workers.node.kubernetes_notices import KubernetesSource
from workers.node.notices import NoticeSource
from workers.node.slurm_notices import SlurmSource


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
