"""Measurements of pgoutbox beside its peers. Nothing here asserts a time; a verdict is a line in a table."""
