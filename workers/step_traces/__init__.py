"""The recordings of a job's ranks, combined: single steps, action by action. Pure Python.

`assembly.py` puts the recordings on one clock (`clocks.py`); `idle.py` computes the bubble, `critical_path.py` what
determines the step's length, `exclusive.py` where each second was spent; `document.py` and `perfetto.py` write the
results.
"""
