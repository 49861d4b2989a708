"""Alembic migrations of the job database, run by `Store.migrate`."""
