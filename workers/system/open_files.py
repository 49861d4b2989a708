"""How many files and connections this process may have open."""

from __future__ import annotations

import resource

from workers.errors import OpenFilesError

OTHERS = 256
"""Number of files that a process opens besides its connections: data, snapshots, libraries, the store."""


def raise_limit(wanted: int) -> int:
    """Raise the limit to `wanted` if it is lower, as far as permitted; returns how many of `wanted` are permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def make_room(connections: int) -> None:
    """Make room for this many connections in addition to everything else. Raises OpenFilesError."""
    wanted = connections + OTHERS
    allowed = raise_limit(wanted)
    if allowed < wanted:
        raise OpenFilesError(
            f"{connections} connections to other ranks take {wanted} open files, and this process may have {allowed}: "
            f"start the node with `ulimit -n {wanted}` or more (nofile in limits.conf, LimitNOFILE in systemd)"
        )
