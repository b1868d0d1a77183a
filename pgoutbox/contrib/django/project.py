"""The outbox of a Django project for `--app` and its processes, which start without manage.py.

It needs the variable DJANGO_SETTINGS_MODULE.
"""

from __future__ import annotations

import django
from django.apps import apps

if not apps.ready:
    django.setup()

from pgoutbox.contrib.django import outbox

__all__ = ["outbox"]
