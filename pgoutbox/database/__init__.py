"""Connections to PostgreSQL, and the statements that run on them."""
