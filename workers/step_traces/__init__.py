"""The recordings of a job's ranks, combined: single steps, action by action. Pure Python.

`assembly.py` puts the recordings on one clock; `analysis.py` computes the bubble, what determines the step's length,
where each second was spent, and the JSON document with the results; `perfetto.py` writes them for Perfetto.
"""
