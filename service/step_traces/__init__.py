"""Traces of jobs as the service answers them: read (`reading.py`), with a budget of the step (`budget.py`) and, where
the planner can plan the job, what it expects of it (`planned.py`). What follows from the slices alone is computed in
`workers/step_traces`.
"""
