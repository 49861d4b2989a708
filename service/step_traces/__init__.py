"""Traces of jobs as the service returns them: read (`reading.py`), with a budget of the step (`budget.py`) and, if the
planner can plan the job, with what it expects of the step. What follows from the slices alone is
computed in `workers/step_traces`."""
