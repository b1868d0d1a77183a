"""`manage.py pgoutbox`."""
