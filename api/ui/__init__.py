"""The dashboard: one document and its modules in `static/`, which ask REST for all that they show (decision 0023)."""

from manta.api.ui.mounting import mount

__all__ = ["mount"]
