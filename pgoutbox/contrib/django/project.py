"""The outbox of a Django project for processes that start without manage.py. It needs DJANGO_SETTINGS_MODULE."""

from __future__ import annotations

import django
from django.apps import apps

if not apps.ready:
    django.setup()

from pgoutbox.contrib.django import outbox

__all__ = ["outbox"]
