"""Browsers that follow a job, as far as the service sees them: `python -m benchmarks.support.dashboard_viewers URL KEY
JOB COUNT`. Each asks what the overview of a job asks (`api/ui/static/pages/job.js`, `pages/job/overview.js`), as often.
Says `ready` once all have asked once; ends with its standard input."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

import httpx

TURN_SECONDS = 1.0
SLOW_TURN = 3
NAMES = "loss,tokens_per_second,tokens,time"
OVERLAP = 8


@dataclass
class Page:
    """One open page."""

    client: httpx.AsyncClient
    job: str
    turn: int = 0
    step: int = -1
    cursor: str | None = None

    async def refresh(self) -> None:
        """One turn of it."""
        job = (await self.client.get(f"/v1/jobs/{self.job}")).json()
        if self.turn % SLOW_TURN == 0:
            more = "" if self.cursor is None else f"&cursor={self.cursor}"
            events = await self.client.get(f"/v1/jobs/{self.job}/events?limit=1000{more}")
            self.cursor = events.json()["resume_cursor"]
            for each in ("ranks", "ledger", "recoveries"):
                await self.client.get(f"/v1/jobs/{self.job}/{each}")
        if job["step"] != self.step:
            after = f"names={NAMES}&max_points=1500&after_step={max(0, self.step - OVERLAP)}"
            await self.client.get(f"/v1/jobs/{self.job}/metrics?{after}")
        self.step, self.turn = job["step"], self.turn + 1


async def _follow(url: str, key: str, job: str, count: int) -> None:
    limits = httpx.Limits(max_connections=count)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=30) as client:
        pages = [Page(client, job) for _ in range(count)]
        await asyncio.gather(*(page.refresh() for page in pages))
        print(json.dumps({"ready": True}), flush=True)
        following = [asyncio.create_task(_forever(page, number / count)) for number, page in enumerate(pages)]
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for each in following:
            each.cancel()


async def _forever(page: Page, shift: float) -> None:
    await asyncio.sleep(shift * TURN_SECONDS)  # people do not open pages at the same moment
    while True:
        await page.refresh()
        await asyncio.sleep(TURN_SECONDS)


if __name__ == "__main__":
    url, key, job, count = sys.argv[1:]
    asyncio.run(_follow(url, key, job, int(count)))
