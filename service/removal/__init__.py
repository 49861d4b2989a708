"""Deletion of jobs and checkpoints."""
