"""No handler of a mailing list begins for an address whose suppression has committed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

from pgoutbox import (
    ArgumentError,
    Context,
    Email,
    Message,
    Outbox,
    RawEmail,
    Skip,
    SyncContext,
    Topic,
    Worker,
    asend_directly,
)
from pgoutbox.operations import Action, MessageFilter, Operator
from tests.support.dump import dump_of
from tests.support.outbox_actions import enqueue, row_of, rows_of, running, settings_for, state_of
from tests.support.smtp_server import accepting_server, mail_settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.operations import SuppressionReason
    from tests.conftest import Connect

ADA: Final = "mailto:ada@example.org"


def outbox_of(dsn: str, **settings: object) -> tuple[Outbox, list[str]]:
    """Return an outbox with topics of the list `news`, of the list `offers` and of none, and what they have begun."""
    outbox, begun = Outbox(settings_for(dsn, **settings)), list[str]()
    for name, mailing_list in (("news", "news"), ("offers", "offers"), ("reset", None)):

        @outbox.handler(Topic(name, mailing_list=mailing_list))
        async def handle(message: Message, ctx: Context) -> None:
            begun.append(f"{message.topic} {message.destination}")

    return outbox, begun


async def deliver(dsn: str, db: psycopg.Connection, *destinations: str, topic: str = "news") -> list[str]:
    """Deliver a message to each destination, and return their states."""
    ids = [enqueue(db, topic, destination=destination) for destination in destinations]
    await Worker(outbox_of(dsn)[0]).run_once()
    return [state_of(db, message_id) for message_id in ids]


# --- the check --------------------------------------------------------------------------------------------------------


async def test_of_1000_messages_queued_and_in_flight_none_begins_after_the_commit(
    dsn: str, db: psycopg.Connection
) -> None:
    """Ten handlers have begun, others wait for a slot, and the rest is pending: exactly the ten are handed over."""
    async with accepting_server() as inbox:
        outbox = Outbox(settings_for(dsn, concurrency=10, batch_size=100, **mail_settings(inbox.port)))
        begun, may_go_on = list[int](), asyncio.Event()

        @outbox.handler(Topic("news", mailing_list="news"))
        async def news(message: Message, ctx: Context) -> Email:
            begun.append(message.id)
            await may_go_on.wait()
            return Email(subject="News", text="News")

        with db.transaction():
            outbox.on(db).enqueue_fanout("news", None, ["mailto:ada@example.org"] * 1_000)
        worker = Worker(outbox)
        async with running(worker):
            await until(lambda: len(begun) == 10)
            assert worker.status().in_flight > 10
            with db.transaction():
                assert outbox.on(db).suppress("ada@example.org", "unsubscribe", mailing_list="news")
            may_go_on.set()
            await until(lambda: all(row.is_finished for row in rows_of(db)))
    rows = rows_of(db)
    assert len(begun) == 10
    assert {row.state for row in rows if row.id in begun} == {"sent"}
    assert {(row.state, row.skip_reason) for row in rows if row.id not in begun} == {
        ("skipped", "suppressed: unsubscribe")
    }
    assert len(inbox.received) == 10


async def test_a_message_that_commits_during_the_suppression_is_not_handed_over(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    """Neither transaction sees the other one."""
    producer = connect()
    message_id = enqueue(producer, "news", destination=ADA)
    with db.transaction():
        Outbox().on(db).suppress("ada@example.org", "complaint")
        producer.commit()
    outbox, begun = outbox_of(dsn)
    await Worker(outbox).run_once()
    assert (state_of(db, message_id), begun) == ("skipped", [])


@pytest.mark.parametrize(
    ("reason", "mailing_list", "begun"),
    [
        ("bounce", None, ["reset"]),
        ("complaint", None, ["reset"]),
        ("unsubscribe", None, ["reset"]),
        ("unsubscribe", "news", ["offers", "reset"]),
        ("manual", "news", ["offers", "reset"]),
    ],
)
async def test_a_suppression_stops_its_list_or_all_and_mail_of_the_account_passes(
    dsn: str, db: psycopg.Connection, reason: SuppressionReason, mailing_list: str | None, begun: list[str]
) -> None:
    outbox, found = outbox_of(dsn)
    Operator(db).suppress("ada@example.org", reason, mailing_list=mailing_list)
    for topic in ("news", "offers", "reset"):
        enqueue(db, topic, destination=ADA)
    await Worker(outbox).run_once()
    assert sorted(found) == [f"{topic} {ADA}" for topic in begun]


async def test_a_suppressed_message_says_why_to_everybody(dsn: str, db: psycopg.Connection) -> None:
    Operator(db).suppress("ada@example.org", "bounce")
    assert await deliver(dsn, db, ADA) == ["skipped"]
    ((message_id, reason, code),) = db.execute(
        "SELECT id, skip_reason, reason_code FROM pgoutbox.message_view"
    ).fetchall()
    assert (reason, code) == ("suppressed: bounce", "suppressed")
    shown, (attempt,) = Operator(db).show_message(message_id)
    assert (shown.skip_reason, attempt.outcome, attempt.reason_code) == (reason, "skipped", code)
    assert [one.id for one in Operator(db).list_messages(MessageFilter(text="suppressed: bounce"))] == [message_id]


async def test_an_address_is_the_same_in_each_of_its_forms(dsn: str, db: psycopg.Connection) -> None:
    for address in ("Ada@Example.ORG", "otto@b\u00fccher.example", "eva@xn--mller-kva.example"):
        Operator(db).suppress(address, "bounce")
    forms = [
        "mailto:ada@example.org",
        "mailto:ADA@EXAMPLE.ORG",
        "MAILTO:ada@example.org",
        "mailto:%61da%40example.org",
        "mailto:Ada Lovelace <ada@example.org>",
        "mailto:otto@B\u00dcCHER.example",
        "mailto:otto@xn--bcher-kva.example",
        "mailto:eva@M\u00fcller.example",
    ]
    assert await deliver(dsn, db, *forms) == ["skipped"] * len(forms)
    assert await deliver(dsn, db, "mailto:ada@example.com", "mailto:ad.a@example.org") == ["sent", "sent"]


async def test_a_suppression_that_is_rolled_back_or_ended_stops_nothing(dsn: str, db: psycopg.Connection) -> None:
    with db.transaction() as transaction:
        Outbox().on(db).suppress("ada@example.org", "bounce")
        raise psycopg.Rollback(transaction)
    assert await deliver(dsn, db, ADA) == ["sent"]
    operator = Operator(db)
    assert [operator.suppress("ada@example.org", "bounce") for _ in range(2)] == [True, False]
    assert await deliver(dsn, db, ADA) == ["skipped"]
    assert [operator.unsuppress("ADA@example.org") for _ in range(2)] == [True, False]
    assert await deliver(dsn, db, ADA) == ["sent"]


async def test_an_open_suppression_blocks_no_sender(dsn: str, db: psycopg.Connection, connect: Connect) -> None:
    writer = connect()
    Outbox().on(writer).suppress("ada@example.org", "bounce")
    assert await deliver(dsn, db, ADA, "mailto:otto@example.org") == ["sent", "sent"]
    writer.commit()
    assert await deliver(dsn, db, ADA) == ["skipped"]


@pytest.mark.parametrize("destination", [None, "https://example.org/hook", "mailto:ada", "mailto:ada@exa mple.org"])
async def test_a_message_of_a_list_without_an_address_fails(
    dsn: str, db: psycopg.Connection, destination: str | None
) -> None:
    """It could not be stopped."""
    outbox, begun = outbox_of(dsn)
    message_id = enqueue(db, "news", destination=destination)
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, begun) == ("failed", [])
    assert "needs a mailto: destination" in str(row.last_error)


@pytest.mark.parametrize(
    "content",
    [
        Email(subject="s", text="t", to="otto@example.org"),
        Email(subject="s", text="t", cc="otto@example.org"),
        Email(subject="s", text="t", bcc=["otto@example.org"]),
        RawEmail(data=b"Subject: s\r\n\r\nt\r\n", to="otto@example.org"),
    ],
)
async def test_a_mail_of_a_list_has_no_other_recipient(
    dsn: str, db: psycopg.Connection, content: Email | RawEmail
) -> None:
    async with accepting_server() as inbox:
        outbox = Outbox(settings_for(dsn, **mail_settings(inbox.port)))

        @outbox.handler(Topic("news", mailing_list="news"))
        async def news(message: Message, ctx: Context) -> Email | RawEmail:
            return content

        message_id = enqueue(db, "news", destination=ADA)
        await Worker(outbox).run_once()
    assert (state_of(db, message_id), inbox.received) == ("failed", [])


async def test_nothing_is_sent_while_the_list_cannot_be_read(dsn: str, db: psycopg.Connection) -> None:
    db.execute("ALTER FUNCTION pgoutbox._suppressed RENAME TO away")
    outbox, begun = outbox_of(dsn)
    message_id = enqueue(db, "news", destination=ADA)
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.attempt_count, row.max_attempts, begun) == ("pending", 1, 12, [])
    assert row.last_error == "not sent: the suppressed addresses are unknown: UndefinedFunction"


@pytest.mark.parametrize("kind", ["sync", "batch", "transactional", "shared transaction"])
async def test_each_kind_of_handler_is_stopped(dsn: str, db: psycopg.Connection, kind: str) -> None:
    outbox, begun = Outbox(settings_for(dsn)), list[str | None]()
    topic = Topic("news", mailing_list="news")
    if kind == "sync":

        @outbox.handler(topic)
        def news(message: Message, ctx: SyncContext) -> None:
            begun.append(message.destination)

    elif kind == "batch":

        @outbox.batch_handler(topic)
        async def batch(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
            begun.extend(message.destination for message in messages)

    else:

        @outbox.handler(topic, transactional=True, max_size=10 if kind == "shared transaction" else None)
        async def write(message: Message, ctx: Context) -> None:
            begun.append(message.destination)

    outbox.on(db).suppress("ada@example.org", "bounce", require_transaction=False)
    with db.transaction():
        outbox.on(db).enqueue_fanout("news", None, [ADA, "mailto:otto@example.org", ADA])
    await Worker(outbox).run_once()
    assert begun == ["mailto:otto@example.org"]
    assert [row.state for row in rows_of(db)] == ["skipped", "sent", "skipped"]


async def test_a_direct_send_is_stopped_too(dsn: str, db: psycopg.Connection) -> None:
    outbox, begun = outbox_of(dsn)
    Operator(db).suppress("ada@example.org", "complaint")
    outcome = await asend_directly(outbox, "news", None, destination=ADA)
    assert isinstance(outcome, Skip)
    assert begun == []


# --- the table --------------------------------------------------------------------------------------------------------


def test_no_table_has_an_address(dsn: str, db: psycopg.Connection) -> None:
    operator = Operator(db, actor="olga")
    operator.suppress("ada@example.org", "bounce", detail="550 5.1.1 <ada@example.org>: no such user Ada@Example.org")
    operator.import_suppressions([{"address": "otto@example.org", "reason": "manual", "detail": "otto@example.org!"}])
    operator.unsuppress("otto@example.org")
    dump = dump_of(dsn).lower()
    assert "ada@" not in dump
    assert "otto@" not in dump
    assert "550 5.1.1 (address) no such user (address)" in dump


def test_acts_of_operators_are_in_the_audit_and_those_of_applications_are_not(db: psycopg.Connection) -> None:
    operator = Operator(db, actor="olga")
    operator.suppress("ada@example.org", "bounce")
    operator.suppress("ada@example.org", "bounce")
    operator.unsuppress("ada@example.org")
    Outbox().on(db).suppress("otto@example.org", "unsubscribe", mailing_list="news", require_transaction=False)
    acts = operator.list_acts()
    assert [(act.action, act.actor) for act in acts] == [(Action.UNSUPPRESS, "olga"), (Action.SUPPRESS, "olga")]


def test_an_export_can_be_imported_again(db: psycopg.Connection) -> None:
    operator = Operator(db)
    operator.suppress("ada@example.org", "bounce", detail="5.1.1")
    operator.suppress("ada@example.org", "unsubscribe", mailing_list="news")
    operator.suppress("otto@example.org", "manual", mailing_list="news")
    operator.unsuppress("otto@example.org", mailing_list="news")
    exported = [
        one._asdict() | {"created_at": one.created_at.isoformat()} for one in operator.export_suppressions(batch_size=1)
    ]
    assert [(one["mailing_list"], one["reason"]) for one in exported] == [(None, "bounce"), ("news", "unsubscribe")]
    db.execute("DELETE FROM pgoutbox.suppression")
    assert [operator.import_suppressions(exported) for _ in range(2)] == [2, 0]
    again = [one._asdict() | {"created_at": one.created_at.isoformat()} for one in operator.export_suppressions()]
    assert again == exported
    assert len(operator.list_suppressions(address="ADA@example.org")) == 2
    assert operator.list_suppressions(address="otto@example.org") == []


def test_an_import_names_its_first_wrong_item_and_keeps_none_of_its_batch(db: psycopg.Connection) -> None:
    operator = Operator(db)
    items: list[Any] = [{"address": "ada@example.org", "reason": "bounce"}, {"digest": "12", "reason": "bounce"}]
    with pytest.raises(ArgumentError, match=r"^items\[1\]\.digest: must be 32 hexadecimal digits"):
        operator.import_suppressions(items)
    assert operator.list_suppressions() == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"address": "ada"}, "address: must be one e-mail address"),
        ({"address": "Ada <ada@example.org>"}, "address: must be one e-mail address"),
        ({"address": "a@b@example.org"}, "address: must be one e-mail address"),
        ({"address": "ada@stra\u00dfe.example"}, "address: must have the domain in its xn-- form"),
        ({"address": 7}, "address: must be text"),
        ({"reason": "spite"}, "reason: must be bounce, complaint, unsubscribe or manual"),
        ({"reason": "bounce", "mailing_list": "news"}, "mailing_list: must be empty"),
        ({"mailing_list": "News Letter"}, "mailing_list: must be 1 to 63"),
    ],
)
def test_a_wrong_suppression_is_refused(db: psycopg.Connection, arguments: dict[str, Any], error: str) -> None:
    given: dict[str, Any] = {"address": "ada@example.org", "reason": "manual", **arguments}
    with pytest.raises(ArgumentError, match=f"^{error}"):
        Operator(db).suppress(**given)
    with pytest.raises(ArgumentError, match=f"^{error}"):
        Outbox().on(db).suppress(**given, require_transaction=False)


async def test_an_erased_person_is_no_longer_suppressed(dsn: str, db: psycopg.Connection) -> None:
    operator = Operator(db)
    for address in ("ada@example.org", "otto@example.org", "eva@example.org"):
        operator.suppress(address, "unsubscribe", mailing_list="news")
    enqueue(db, "news", destination="mailto:Otto@example.org", owner="otto")
    operator.erase(destination="ADA@example.org")
    operator.erase(owner="otto")
    left = db.execute("SELECT digest = pgoutbox.address_digest('eva@example.org') FROM pgoutbox.suppression").fetchall()
    assert left == [(True,)]
    assert [act.action for act in operator.list_acts()][:2] == [Action.ERASE, Action.ERASE]
