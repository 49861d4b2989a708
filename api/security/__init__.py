"""Who asks, what they may do, and what is refused before anything else."""
