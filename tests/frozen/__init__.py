"""The schema of the last release with messages in all states, frozen as a dump. See `__main__`."""
