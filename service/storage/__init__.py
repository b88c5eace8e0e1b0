"""Postgres: tables, queue, reports, events."""
