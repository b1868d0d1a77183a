"""Enqueue: turn a call of a producer into one statement on the caller's connection."""
