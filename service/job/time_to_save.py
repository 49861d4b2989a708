"""How long a job needs to have its state saved before it gives its places back: so long before its nodes are gone it
begins. And how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from service.job.record import JobRecord
from service.store import checkpoints

SAVE_SECONDS = 300.0
"""How long a job may take to have its state saved before it leaves without, unless its saves always take longer."""
PATIENCE = 6
"""So many times what it needs a single save may take where the state is in memory too: what takes longer most likely
lies with a store that does not answer."""
LONGEST_SECONDS = 3600.0
"""Of what a job is taken to need: saves that were noted late are no measure."""
LATEST = 5
"""Of so many saves the one in the middle counts."""
UNKNOWN_SAVE_SECONDS = 30.0
"""What a save is taken to last where none of the job's is known."""
SPARE_SECONDS = 10.0
"""Until it is seen that time is short, until all ranks are asked, and until everything is given back."""


async def time_to_save(record: JobRecord) -> float:
    """Seconds that the job needs to have its state saved, going by its last saves and steps."""
    saves = await record.read(lambda s: checkpoints.latest_seconds(s, record.id, LATEST))
    return seconds_to_save(saves, (await record.job()).metrics.get("step_seconds"))


def seconds_to_save(saves: Sequence[float], step_seconds: float | str | None) -> float:
    """The same for a job whose last saves took `saves` seconds, from the first to the last rank, and whose last step
    took `step_seconds`; None, or a word, where that is not known. Another save may have to end before this one, and a
    step that has just begun has to end too; each may take twice as long as ever before."""
    save = median(saves) if saves else UNKNOWN_SAVE_SECONDS
    step = step_seconds if isinstance(step_seconds, int | float) else 0.0
    return min(LONGEST_SECONDS, 2 * save + 2 * step + SPARE_SECONDS)


def seconds_allowed(needed: float) -> float:
    """How long a job that needs `needed` seconds to have its state saved may take."""
    return max(needed, SAVE_SECONDS)
