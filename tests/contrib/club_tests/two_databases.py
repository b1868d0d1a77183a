"""Tests with the outbox in the database `mail` and the members in `default`."""

# ruff: noqa: PT027 - these tests run without pytest.

from __future__ import annotations

from django.db import IntegrityError, connections, transaction

from pgoutbox import SchemaError
from pgoutbox.contrib.django import outbox
from pgoutbox.contrib.django.test import OutboxTestCase

from .models import Member


class BothTest(OutboxTestCase):
    """The handlers see the members of the test in the other database."""

    databases = {"default", "mail"}  # noqa: RUF012 - as Django has it

    def test_a_message_of_one_database_about_a_row_of_the_other(self) -> None:
        pk = Member.objects.create(email="bob@example.org").pk
        for topic in ("mail.welcome", "mail.async", "break"):
            outbox.on(connections["mail"]).enqueue(topic, {"pk": pk})
        with self.driver.expect_raised(IntegrityError):
            self.driver.drain()
        assert len(self.driver.deliveries) == 2
        assert Member.objects.get().greeting_count == 2

    def test_the_wrong_connection_is_named(self) -> None:
        with self.assertRaisesRegex(
            SchemaError, "connection: is that of DATABASES\\['default'\\], where pgoutbox does"
        ):
            outbox.on(connections["default"]).enqueue("mail.welcome", {"pk": 1})
        transaction.set_rollback(True)


class ForgottenTest(OutboxTestCase):
    """A test case that does not name the database of the outbox."""

    def test_django_names_it(self) -> None:
        with self.assertRaisesRegex(AssertionError, "Add 'mail' to members.two_databases.ForgottenTest.databases"):
            self.driver.messages()
