"""From a call of `Outbox.enqueue` to one statement on the caller's connection."""
