"""The version of the REST API. Client and service send theirs with every request and answer; a client that sends none,
such as curl or an older release, is accepted."""

from __future__ import annotations

HEADER = "Manta-Rest"
REST = 1
"""Version of the API that this release's client and service speak. Raised by a change that breaks the other end."""
SPOKEN: tuple[int, ...] = (1,)
"""Versions of the other end that this release works with."""


def other_client(version: str | None) -> str | None:
    """What a service says to a client that says this in its header; None: nothing, they understand each other."""
    if _is_spoken(version):
        return None
    return (
        f"the client speaks version {_shown(version)} of Manta's REST API and this service {_ours()}: use a client of "
        "the service's release, or start a service of the client's"
    )


def other_service(version: str | None) -> str | None:
    """What a client says about a service that says this in its header; None: nothing, they understand each other."""
    if _is_spoken(version):
        return None
    return (
        f"the service speaks version {_shown(version)} of Manta's REST API and this client {_ours()}: use a client of "
        "the service's release"
    )


def _is_spoken(version: str | None) -> bool:
    return version is None or version in [str(spoken) for spoken in SPOKEN]


def _shown(version: str | None) -> str:
    return (version or "")[:20]


def _ours() -> str:
    return " and ".join(map(str, SPOKEN))
