"""Pages without a browser: what is built lies in memory, where a test looks at it."""

import asyncio

from nicegui import Client, ui


def on_a_page(body):
    """What the coroutine function `body` returns, called where a page is being built."""

    async def main():
        with Client(ui.page("/nowhere"), request=None):
            return await body()

    return asyncio.run(main())


def texts(element):
    """All that can be read in an element, in order."""
    own = [element.text] if getattr(element, "text", "") else []
    return own + [text for slot in element.slots.values() for child in slot.children for text in texts(child)]
