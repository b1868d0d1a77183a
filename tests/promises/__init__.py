"""Promises, tested at the surface: processes, SQL, HTTP and the public API.

A test here knows no inner part of pgoutbox, so it holds for any worker that keeps the promise.
"""
