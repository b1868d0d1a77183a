"""The migrations of Django's own tables. `migrate` brings the schema of pgoutbox after them."""
