"""Tests that inject real faults."""
