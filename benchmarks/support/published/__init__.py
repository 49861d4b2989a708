"""Published figures, and what this project's arithmetic and planner make of the same cases."""
