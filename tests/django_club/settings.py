"""The project's settings: the database of the test, and the age of its connections."""

from __future__ import annotations

import os

from psycopg.conninfo import conninfo_to_dict

_info = conninfo_to_dict(os.environ["CLUB_DSN"])
_max_age = os.environ.get("CLUB_MAX_AGE", "0")

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _info["dbname"],
        "USER": _info["user"],
        "PASSWORD": _info.get("password", ""),
        "HOST": _info["host"],
        "PORT": _info.get("port", ""),
        "OPTIONS": {"application_name": "club"},
        "CONN_MAX_AGE": None if _max_age == "unlimited" else int(_max_age),
        "CONN_HEALTH_CHECKS": os.environ.get("CLUB_HEALTH_CHECKS") == "true",
    }
}
INSTALLED_APPS = ["tests.django_club"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "of a test"
USE_TZ = True
