"""A rehearsal of an upgrade, and of the way back, while messages flow. See `__main__`."""
