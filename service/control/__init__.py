"""The control plane: what should run, decided from the job database."""
