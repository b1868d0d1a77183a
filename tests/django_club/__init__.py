"""A small Django project whose handlers use the ORM, for the tests that run it in processes of its own."""
