"""To be imported before torch, by programs that load it themselves: threads that wait for the others of this process
then sleep soon (`SHORT_WAITS` in `workers/threads.py`), unless whoever has started it says otherwise."""

import os

from workers.threads import SHORT_WAITS

for _name, _value in SHORT_WAITS.items():
    os.environ.setdefault(_name, _value)
