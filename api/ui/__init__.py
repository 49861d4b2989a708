"""The dashboard: a list of jobs and a live page for each, served below `/ui` and fed by the Python client alone."""

from api.ui.mounting import mount

__all__ = ["mount"]
