"""Alembic migrations, shipped in the wheel."""
