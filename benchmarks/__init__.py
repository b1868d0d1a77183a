"""Benchmarks of pgoutbox and other systems. No benchmark asserts a time; a verdict is a line in a table."""
