"""Specs that were stored by another version of Manta, and what is said where this one no longer takes them."""

from __future__ import annotations

from pydantic import ValidationError


def stored_spec_problem(error: ValidationError) -> str:
    """Why a stored spec cannot be run, and what to do."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the spec"
    more = f" and {error.error_count() - 1} more problems" if error.error_count() > 1 else ""
    return (
        f"this release of Manta does not take the stored spec: {where}: {first['msg']}{more}; a release that does goes "
        "on with the job, or cancel it and submit it again"
    )
