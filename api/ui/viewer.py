"""Who looks at a page, and what they may do there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from nicegui import ui

from api import calls
from api.access_schemas import Me
from api.client import ApiError, AsyncMantaClient, ServiceUnreachable
from service.identity import Scope

_PATIENCE_SECONDS = 1.0
_SIGNED_OUT = "/"


@dataclass(frozen=True)
class Viewer:
    """Whoever has opened a page."""

    client: AsyncMantaClient
    """Asks the service with their rights."""
    me: Me | None = None
    """Who they are; None: the service did not say."""

    @property
    def may_change(self) -> bool:
        """Whether it makes sense to offer what changes a job. The service decides; where it did not say, it will."""
        return self.me is None or Scope(self.me.scope).covers(Scope.SUBMIT)

    @property
    def name(self) -> str:
        """How they are called: the user, else the key."""
        return "" if self.me is None else self.me.user or self.me.key_name

    async def sign_out(self) -> None:
        """End the browser's session, and leave the page."""
        try:
            await self.client.send(calls.end_session())
        except (ApiError, ServiceUnreachable) as error:
            ui.notify(str(error), type="warning", position="top")
            return
        ui.navigate.to(_SIGNED_OUT)


async def viewer_of(client: AsyncMantaClient) -> Viewer:
    """Who looks through `client`."""
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            me = await client.send(calls.me())
    except (ApiError, ServiceUnreachable, TimeoutError):
        return Viewer(client)
    return Viewer(client, me)
