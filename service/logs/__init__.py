"""The output of ranks, as users read it."""
