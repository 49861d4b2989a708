"""The recordings of a job's ranks, combined: single steps, action by action. Pure Python.

`assembly.py` puts the recordings on one clock; `analysis.py` computes the bubble, what determines the step's length,
and where each second was spent; `document.py` and `perfetto.py` write the results.
"""
