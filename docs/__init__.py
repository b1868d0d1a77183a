"""The documentation. `generate` writes the pages of `reference/` from the code and the database."""
