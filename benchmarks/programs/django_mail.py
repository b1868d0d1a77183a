"""A Django project whose e-mail goes through pgoutbox. COUNT: enqueue e-mails in transactions of 1,000."""

from __future__ import annotations

import os
import sys

import django
from django.conf import settings
from django.core import mail
from django.db import transaction
from psycopg.conninfo import conninfo_to_dict

from benchmarks.programs.clients import SUBJECT, TEXT
from benchmarks.programs.lifeline import hold_lifeline, say

_NAMES = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
_DSN = conninfo_to_dict(os.environ["PGOUTBOX_DSN"])

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            **{_NAMES[name]: value for name, value in _DSN.items() if name in _NAMES},
        }
    },
    DEFAULT_FROM_EMAIL=os.environ["PGOUTBOX_SMTP_SENDER"],
    EMAIL_BACKEND="pgoutbox.contrib.django.mail.EmailBackend",
    EMAIL_HOST=os.environ["PGOUTBOX_SMTP_HOST"],
    EMAIL_PORT=os.environ["PGOUTBOX_SMTP_PORT"],
    INSTALLED_APPS=["pgoutbox.contrib.django"],
    USE_TZ=True,
)
django.setup()


def email(number: int) -> mail.EmailMessage:
    return mail.EmailMessage(SUBJECT, TEXT.format(number), to=["ann@example.org"])


def main(count: int) -> int:
    hold_lifeline()
    for start in range(0, count, 1_000):
        with transaction.atomic():
            mail.get_connection().send_messages([email(number) for number in range(start, min(start + 1_000, count))])
    say(count=count)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
