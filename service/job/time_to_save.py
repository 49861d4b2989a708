"""How long before its nodes are gone a job must begin to save its state and give its places back, and how long that may
take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from service.job.record import JobRecord
from service.store import checkpoints

SAVE_SECONDS = 300.0
"""Seconds that saving its state may take before a job leaves without it, unless its saves always take longer."""
PATIENCE = 6
"""A save may take this many times the expected time if the state is in memory too: one that takes longer most likely
waits for a store that does not answer."""
LONGEST_SECONDS = 3600.0
"""Upper limit of the time that a job is assumed to need: saves that were recorded late are no measure."""
LATEST = 5
"""The median of this many saves counts."""
UNKNOWN_SAVE_SECONDS = 30.0
"""Assumed seconds of a save if none of the job's is known."""
SPARE_SECONDS = 10.0
"""Seconds until it is noticed that time is short, all ranks are asked, and everything is given back."""


async def time_to_save(record: JobRecord) -> float:
    """Seconds that the job needs to have its state saved, from its last saves and steps."""
    saves = await record.read(lambda s: checkpoints.latest_seconds(s, record.id, LATEST))
    return seconds_to_save(saves, (await record.job()).metrics.get("step_seconds"))


def seconds_to_save(saves: Sequence[float], step_seconds: float | str | None) -> float:
    """Seconds that a job needs to have its state saved if its last saves took `saves` seconds, from the first to the
    last rank, and its last step took `step_seconds`; None, or a word, if unknown. Another save may have to end before
    this one, and a step that has just begun has to end too; each may take twice as long as ever before."""
    save = median(saves) if saves else UNKNOWN_SAVE_SECONDS
    step = step_seconds if isinstance(step_seconds, int | float) else 0.0
    return min(LONGEST_SECONDS, 2 * save + 2 * step + SPARE_SECONDS)


def seconds_allowed(needed: float) -> float:
    """Seconds that a job may take that needs `needed` seconds to have its state saved."""
    return max(needed, SAVE_SECONDS)
