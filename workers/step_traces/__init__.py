"""The recordings of a job's ranks, put together: single steps, action by action. Pure Python.

`assembly.py` puts the recordings on one clock (`clocks.py`); `idle.py` tells the bubble, `critical_path.py` what the
step's length hangs on, `exclusive.py` where each second went; `document.py` and `perfetto.py` write it down.
"""
