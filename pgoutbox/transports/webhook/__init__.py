"""Webhooks: signed HTTP requests, never to an address that is not public."""
