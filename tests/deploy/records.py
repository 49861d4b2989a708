"""A container as its engine would run it, whichever file describes it: docker-compose.yml, or what a chart renders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mount:
    """A file or folder that the container sees."""

    source: str
    """A path on the host, or the name of a volume."""
    target: str
    read_only: bool = False

    @property
    def is_volume(self) -> bool:
        """Whether the engine keeps it under a name."""
        return not self.source.startswith(("/", "."))


@dataclass(frozen=True)
class WayIn:
    """What a network policy lets in: from which container, to which ports."""

    source: str
    ports: tuple[tuple[int, int], ...] = ()
    """First and last of each range; none: all ports."""


@dataclass(frozen=True)
class Container:
    """What is started: in which image, what, with which environment, as whom, and what it may."""

    name: str
    image: str
    command: tuple[str, ...]
    """Entrypoint and arguments."""
    entrypoint_words: int = 0
    """How many words of that are the entrypoint."""
    environment: Mapping[str, str] = field(default_factory=dict)
    user: int | None = None
    """None: the image's."""
    group: int | None = None
    networks: frozenset[str] = frozenset()
    address: str | None = None
    """The IP address that it must have."""
    mounts: tuple[Mount, ...] = ()
    temporary: Mapping[str, str] = field(default_factory=dict)
    """Folders in memory, each with its mount options."""
    shared_memory: int = 64 * 2**20
    """Size of /dev/shm in bytes."""
    read_only: bool = False
    """Whether its root file system is."""
    capabilities: bool = True
    """Whether it keeps any."""
    new_privileges: bool = True
    """Whether a program may gain some."""
    init: bool = False
    """Whether its first process is the engine's, which passes signals on and reaps."""
    once: bool = False
    """Whether it is to end, with 0; any other is started again whenever it ends."""
    health: tuple[str, ...] | None = None
    """Command that ends with 0 when all is well."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Containers that must be there before: `healthy` or `completed`."""
    published: tuple[int, ...] = ()
    """Ports that are reached from outside."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Most of each resource that it gets: cpus, memory, pids."""
    ways_in: tuple[WayIn, ...] | None = None
    """All that is let in; None: whatever comes from its networks."""
    before_stop: tuple[str, ...] = ()
    """Command that is run in it before it is told to end."""
    stop_signal: str = "SIGTERM"
