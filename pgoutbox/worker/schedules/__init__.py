"""Schedules: enqueues the messages of schedules at their times."""
