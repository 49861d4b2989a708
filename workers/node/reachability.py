"""Which addresses can be reached from this machine, and ports on which others can try to reach it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from workers.protocol.messages import Endpoint, ListeningPorts
from workers.system.ports import PortRange, listen

AT_ONCE = 64
"""Number of connections that are tried at the same time."""


def listen_for_a_moment(host: str, ports: PortRange | None, count: int, seconds: float) -> ListeningPorts:
    """Accept connections on `count` of `ports` (None: any) for `seconds`; returns which. The kernel accepts them: no
    code has to answer. Raises OSError if no port is free."""
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(listen(host, ports)) for _ in range(count)]
        asyncio.get_running_loop().call_later(seconds, opened.pop_all().close)
    return ListeningPorts(host, tuple(int(listener.getsockname()[1]) for listener in listeners))


async def unreached(addresses: Sequence[Endpoint], seconds: float) -> list[Endpoint]:
    """The `addresses` that accept no connection within `seconds`."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def is_reached(address: Endpoint) -> bool:
        async with turn:
            try:
                async with asyncio.timeout(seconds):
                    _, writer = await asyncio.open_connection(address.host, address.port)
            except OSError:  # includes timeouts
                return False
            writer.close()
            return True

    reached = await asyncio.gather(*map(is_reached, addresses))
    return [address for address, is_there in zip(addresses, reached, strict=True) if not is_there]
