"""The club's own tests, which `manage.py test` runs: they drain the outbox."""

from __future__ import annotations

from django.db import connection, transaction
from django.test import TransactionTestCase

from pgoutbox import State
from pgoutbox.testing import OutboxDriver
from tests.django_club.database import dsn_of
from tests.django_club.handlers import outbox
from tests.django_club.models import Member

EMAIL = "ada@example.org"


class GreetingTest(TransactionTestCase):  # type: ignore[misc] # Django ships no types.
    """Greetings by each kind of handler."""

    def test_every_kind_of_handler_greets_with_the_orm(self) -> None:
        """Each message is sent, and each handler has written with a connection that Django made."""
        topics = ("greet.sync", "greet.async", "greet.batch", "greet.transactional")
        with transaction.atomic():
            Member.objects.create(email=EMAIL)
            for topic in topics:
                outbox.on(connection).enqueue(topic, EMAIL)
        driver = OutboxDriver(outbox, dsn_of(connection))
        self.addCleanup(driver.clear)
        driver.drain()
        assert [row.last_error for row in driver.messages()] == [None] * len(topics)
        assert len(driver.messages(state=State.SENT)) == len(topics)
        assert Member.objects.get().greeting_count == len(topics)
