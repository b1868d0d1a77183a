"""Helpers of the tests: servers, applications for worker processes, and shared actions."""
