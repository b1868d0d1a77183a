"""Enqueue: turn a call of `Outbox.enqueue` into one statement on the caller's connection."""
