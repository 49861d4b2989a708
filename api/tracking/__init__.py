"""A job's metrics in other tools."""
