"""A job's metrics in other people's tools."""
