"""The tests of the club. Those of `TestCase` deliver in their own transaction."""

# ruff: noqa: PT027 - these tests run without pytest.

from __future__ import annotations

import logging
import sys
import threading

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import IntegrityError, connection, transaction
from django.test import TransactionTestCase
from typing_extensions import Unpack

from pgoutbox import State, Transient
from pgoutbox.contrib.django import outbox
from pgoutbox.contrib.django.test import OutboxTestCase, ProjectDriver
from pgoutbox.enqueue.producer import EnqueueOptions
from pgoutbox.errors import ConfigurationError
from pgoutbox.testing import OutboxDriver

from .models import Member
from .outbox import seen
from .tasks import count_members
from .views import sign_up

logging.getLogger("pgoutbox").setLevel(logging.CRITICAL)


def put(topic: str, payload: object = None, **options: Unpack[EnqueueOptions]) -> None:
    outbox.on(connection).enqueue(topic, payload, **options)


class Base(OutboxTestCase):
    """Each test begins with an empty outbox and one member."""

    def setUp(self) -> None:
        seen.clear()
        assert Member.objects.count() == 0
        assert self.driver.messages() == []
        self.pk = Member.objects.create(email="bob@example.org").pk

    def tearDown(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            assert cursor.fetchone() == ("0",)
            cursor.execute("SELECT count(*) FROM pgoutbox.claim")
            assert cursor.fetchone() == (0,)

    def states(self) -> list[str]:
        return [str(row.state) for row in self.driver.messages()]

    def greeted(self) -> int:
        return int(Member.objects.get(pk=self.pk).greeting_count)


class KindTest(Base):
    """Handlers of each kind see the rows of the test."""

    def test_functions_run_in_the_thread_of_the_test(self) -> None:
        put("mail.welcome", {"pk": self.pk})
        self.driver.run_pass()
        assert [delivery.content.to for delivery in self.driver.deliveries] == ["bob@example.org"]  # type: ignore[attr-defined]
        assert self.driver.assert_enqueued("mail.welcome", payload={"pk": self.pk}, count=1)
        assert seen == [threading.get_ident()]
        assert (self.states(), self.greeted()) == (["sent"], 1)

    def test_pytest_is_not_needed(self) -> None:
        assert "pytest" not in sys.modules

    def test_async_handlers(self) -> None:
        put("mail.async", {"pk": self.pk})
        self.driver.drain()
        assert len(self.driver.deliveries) == 1
        assert (self.states(), self.greeted()) == (["sent"], 1)

    def test_batches_and_middleware(self) -> None:
        for _ in range(3):
            put("greet.batch", {"pk": self.pk})
        self.driver.run_pass()
        assert seen == ["middleware", 2, "middleware", 1]
        assert self.greeted() == 3

    def test_transactional_handlers_keep_or_undo_their_writes(self) -> None:
        topics = ("greet.transactional", "greet.transactional.async", "greet.shared", "greet.transactional.batch")
        for topic in topics:
            put(topic, {"pk": self.pk, "refuse": True})
            put(topic, {"pk": self.pk})
        with self.driver.expect_failed(match="refused") as failed:
            self.driver.run_pass()
        assert len(failed) == 4
        assert self.greeted() == 4
        assert sorted(self.states()) == ["failed"] * 4 + ["sent"] * 4

    def test_a_handler_enqueues_for_another_queue(self) -> None:
        put("relay")
        self.driver.drain()
        assert [(row.topic, row.queue) for row in self.driver.messages()] == [("relay", "default"), ("try", "other")]
        assert self.states() == ["sent", "sent"]

    def test_large_and_encrypted_payloads(self) -> None:
        put("secret", "s" * 100_000)
        with connection.cursor() as cursor:
            cursor.execute("SELECT payload::text FROM pgoutbox.message")
            assert "s" * 20 not in cursor.fetchone()[0]
        self.driver.run_pass()
        assert seen == ["s" * 100_000]
        assert self.driver.messages()[0].payload == "s" * 100_000


class OutcomeTest(Base):
    """Outcomes, and the time."""

    def test_a_retry_is_due_again_only_after_make_due(self) -> None:
        put("try", "transient")
        self.driver.run_pass()
        self.driver.run_pass()
        assert seen == [1]
        self.driver.make_due()
        self.driver.run_pass()
        assert seen == [1, 2]
        self.driver.drain()
        assert (seen, self.states()) == ([1, 2, 3], ["sent"])

    def test_snoozes_and_scheduled_messages(self) -> None:
        put("try", "snooze")
        put("try", "scheduled", delay=3600)
        self.driver.run_pass()
        assert self.states() == ["pending", "pending"]
        self.driver.drain()
        assert self.states() == ["sent", "sent"]
        assert seen == [1, 1, 2]

    def test_failures_fail_the_test_unless_it_expects_them(self) -> None:
        put("try", "permanent")
        put("try", "raise")
        put("try", "skip")
        with self.driver.expect_failed(match="no such user"):
            with self.assertRaises(AssertionError) as raised:
                self.driver.run_pass()
            assert "1 attempt raised an exception." in str(raised.exception)
            self.driver.make_due()
            with self.assertRaises(AssertionError) as raised, self.driver.expect_raised(KeyError):
                self.driver.drain()
        assert "1 message ended failed." in str(raised.exception)
        assert "KeyError: 'nope'" in str(raised.exception)
        assert 'raise KeyError("nope")' in str(raised.exception)
        assert self.states() == ["failed", "failed", "skipped"]

    def test_the_receiver_answers_and_messages_are_deleted(self) -> None:
        self.driver.answer_with(lambda _: Transient("451 busy"))
        for _ in range(20):
            put("mail.welcome", {"pk": self.pk})
        self.driver.run_pass()
        assert [row.last_error for row in self.driver.messages(state=State.PENDING)] == ["451 busy"] * 20
        self.driver.clear()
        assert self.driver.messages() == []

    def test_keys(self) -> None:
        put("try", "old", coalesce_key="k")
        put("try", "new", coalesce_key="k")
        put("try", "once", dedupe_key="d")
        put("try", "once", dedupe_key="d")
        put("try", "transient", ordering_key="o")
        put("try", "behind", ordering_key="o")
        self.driver.run_pass()
        assert {row.payload: str(row.state) for row in self.driver.messages()} == {
            "old": "skipped",
            "new": "sent",
            "once": "sent",
            "transient": "pending",
            "behind": "pending",
        }
        self.driver.drain()
        assert self.states() == ["skipped", "sent", "sent", "sent", "sent"]

    def test_an_attempt_notices_that_it_is_superseded_and_one_that_is_too_slow_ends(self) -> None:
        put("super", "old", coalesce_key="k")
        put("slow")
        self.driver.run_pass()
        assert {row.topic: str(row.state) for row in self.driver.messages()} == {"super": "sent", "slow": "pending"}
        self.driver.drain()
        assert (self.states(), seen) == (["skipped", "sent", "sent"], ["old", "new"])

    def test_messages_are_deleted_by_a_retention_rule_and_wait_in_a_paused_queue(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO pgoutbox.retention (topic, state, keep) VALUES ('try', 'sent', '0')")
            cursor.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('quiet', now())")
        put("try")
        put("try", queue="quiet")
        self.driver.run_pass()
        assert [(row.queue, str(row.state)) for row in self.driver.messages()] == [("quiet", "pending")]

    def test_an_attempt_that_breaks_the_transaction_is_undone(self) -> None:
        put("break", "cursor")
        put("break", "atomic")
        put("mail.welcome", {"pk": self.pk})
        with self.driver.expect_raised(IntegrityError) as raised:
            self.driver.run_pass()
        assert len(raised) == 2
        assert Member.objects.count() == 1
        assert self.states() == ["pending", "pending", "sent"]
        assert all("IntegrityError" in str(row.last_error) for row in self.driver.messages(state=State.PENDING))
        self.driver.drain()
        assert self.states() == ["sent", "sent", "sent"]

    def test_functions_for_the_commit_of_a_handler_run_and_those_of_the_test_do_not(self) -> None:
        transaction.on_commit(lambda: seen.append("the test"))
        put("late")
        self.driver.run_pass()
        assert seen == ["committed"]
        put("late")
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            self.driver.run_pass()
        assert callbacks == []
        assert seen == ["committed", "committed"]

    def test_rolled_back_messages_are_not_delivered(self) -> None:
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            sign_up("eve@example.org")
            _ = 1 / 0
        self.driver.drain()
        assert self.driver.messages() == []


class SetUpTestDataTest(OutboxTestCase):
    """Each test begins with the message of the class."""

    @classmethod
    def setUpTestData(cls) -> None:
        sign_up("bob@example.org")

    def test_one(self) -> None:
        self.driver.drain()
        assert [str(row.state) for row in self.driver.messages()] == ["sent"]

    def test_another(self) -> None:
        self.test_one()


class AsyncTest(Base):
    """Async tests, whose queries run in the thread of the test, too."""

    async def test_an_async_test_delivers(self) -> None:
        for topic in ("mail.welcome", "mail.async"):
            await sync_to_async(put)(topic, {"pk": self.pk})
        await sync_to_async(self.driver.drain)()
        assert len(self.driver.deliveries) == 2
        assert await sync_to_async(self.greeted)() == 2

    async def test_the_event_loop_is_refused(self) -> None:
        with self.assertRaises(SynchronousOnlyOperation):
            self.driver.run_pass()
        with self.assertRaises(SynchronousOnlyOperation):
            put("try")

    async def test_an_async_view_enqueues(self) -> None:
        with self.assertRaises(SynchronousOnlyOperation):
            await self.async_client.get("/join-async/?directly")
        assert (await self.async_client.get("/join-async/")).content == b"joined"
        await sync_to_async(self.driver.drain)()
        assert len(self.driver.deliveries) == 1


class ViewTest(OutboxTestCase):
    """ATOMIC_REQUESTS."""

    def test_a_request_enqueues_if_it_succeeds(self) -> None:
        assert self.client.get("/join/?refuse").status_code == 403
        assert self.driver.messages() == []
        assert self.client.get("/join/").status_code == 200
        self.driver.drain()
        assert len(self.driver.deliveries) == 1


class TaskTest(Base):
    """Tasks see the rows of the test."""

    def test_a_task_runs_and_its_result_is_read(self) -> None:
        result = count_members.enqueue()
        self.driver.drain()
        result.refresh()
        assert result.return_value == 1


class ClosedTest(OutboxTestCase):
    """The transaction of this test is lost."""

    def test_a_handler_that_closes_the_connection_fails_the_test(self) -> None:
        put("closes")
        with self.assertRaisesRegex(ConfigurationError, "a handler has closed the connection"):
            self.driver.run_pass()


class CommittedTest(TransactionTestCase):  # type: ignore[misc] # Django ships no types.
    """Tests that commit."""

    def setUp(self) -> None:
        self.driver = OutboxDriver(outbox, outbox.settings.require_dsn())
        self.addCleanup(self.driver.clear)

    def test_the_driver_has_its_own_connection(self) -> None:
        assert self.driver.messages() == []
        sign_up("bob@example.org")
        self.driver.drain()
        assert len(self.driver.deliveries) == 1
        with self.assertRaises(ConfigurationError):
            ProjectDriver().messages()

    def test_messages_are_deleted_after_each_test(self) -> None:
        self.test_the_driver_has_its_own_connection()

    def test_a_request_rolls_back(self) -> None:
        assert self.client.get("/join/?refuse").status_code == 403
        assert self.driver.messages() == []
        assert Member.objects.count() == 0
