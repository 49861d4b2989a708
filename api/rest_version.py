"""The version of the REST API. Client and service send theirs with every request and answer; a client that sends none,
such as curl or an older release, is accepted."""

from __future__ import annotations

HEADER = "Manta-Rest"
REST = 1
"""Version of the API of this release's client and service. Incremented by changes that are incompatible with the other
end."""
SUPPORTED_VERSIONS: tuple[int, ...] = (1,)
"""Versions of the other end that this release supports."""


def client_incompatibility(version: str | None) -> str | None:
    """The service's objection to a client that sends this version; None: they are compatible."""
    if _is_supported(version):
        return None
    return (
        f"the client speaks version {_shown(version)} of Manta's REST API and this service {_ours()}: use a client of "
        "the service's release, or start a service of the client's"
    )


def service_incompatibility(version: str | None) -> str | None:
    """The client's objection to a service that sends this version; None: they are compatible."""
    if _is_supported(version):
        return None
    return (
        f"the service speaks version {_shown(version)} of Manta's REST API and this client {_ours()}: use a client of "
        "the service's release"
    )


def _is_supported(version: str | None) -> bool:
    return version is None or version in [str(spoken) for spoken in SUPPORTED_VERSIONS]


def _shown(version: str | None) -> str:
    return (version or "")[:20]


def _ours() -> str:
    return " and ".join(map(str, SUPPORTED_VERSIONS))
