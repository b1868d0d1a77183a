"""Faults, injected for real."""
