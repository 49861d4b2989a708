"""Pipeline schedules: modules by family, each schedule with its order of passes and its properties. Pure Python.

`action_lists` adds sends and receives to the order; the runtime executes the lists, the planner times them, and neither
knows which schedule it is.
"""

from __future__ import annotations

from manta.workers.schedules.gpipe import GPIPE
from manta.workers.schedules.one_forward_one_backward import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from manta.workers.schedules.schedule import Schedule
from manta.workers.schedules.zero_bubble import ZERO_BUBBLE_H1, ZERO_BUBBLE_H2, ZERO_BUBBLE_V

_ALL = (GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, ZERO_BUBBLE_H1, ZERO_BUBBLE_H2, ZERO_BUBBLE_V)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}
"""All schedules by name."""
RUN_BY_ENGINE = tuple(name for name, schedule in SCHEDULES.items() if schedule.runs)
"""Names of those that a job may have."""
