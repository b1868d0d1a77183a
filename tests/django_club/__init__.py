"""A small Django project whose handlers use the ORM, for tests that run it in separate processes."""
