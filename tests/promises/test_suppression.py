"""No handler of a mailing list begins for an address whose suppression has committed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import psycopg
import psycopg.errors
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
    from collections.abc import Awaitable, Callable, Sequence

    from pgoutbox import Outcome
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


@pytest.mark.parametrize("worker_count", [1, 3])
async def test_of_1000_messages_queued_and_in_flight_none_begins_after_the_commit(
    dsn: str, db: psycopg.Connection, worker_count: int
) -> None:
    """Ten handlers of each worker have begun, others wait for a slot, and the rest is pending.

    The ten are sent, but for those whose answer has grown too old for their hand-over.
    """
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
        workers = [Worker(outbox) for _ in range(worker_count)]
        async with AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(running(worker))
            await until(lambda: len(begun) == 10 * worker_count)
            assert all(worker.status().in_flight > 10 for worker in workers)
            with db.transaction():
                assert outbox.on(db).suppress("ada@example.org", "unsubscribe", mailing_list="news")
            may_go_on.set()
            await until(lambda: all(row.is_finished for row in rows_of(db)))
    rows = rows_of(db)
    assert len(begun) == 10 * worker_count
    sent = {row.id for row in rows if row.state == "sent"}
    assert sent <= set(begun)
    assert len(inbox.received) == len(sent)
    assert {(row.state, row.skip_reason) for row in rows if row.id not in sent} == {
        ("skipped", "suppressed: unsubscribe")
    }


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


@pytest.mark.parametrize("destination", ["mailto:ann%2Bnews@example.org", "mailto:J%C3%96RG@example.org"])
async def test_a_destination_is_an_address(dsn: str, db: psycopg.Connection, destination: str) -> None:
    """As a handler of bounces finds it in a message."""
    assert Operator(db).suppress(destination, "bounce")
    assert await deliver(dsn, db, destination, unquote(destination), destination.lower()) == ["skipped"] * 3
    others = "mailto:ann@example.org", "mailto:ann%252Bnews@example.org", "mailto:jorg@example.org"
    assert await deliver(dsn, db, *others) == ["sent"] * 3


async def test_an_address_is_the_same_in_each_of_its_forms(dsn: str, db: psycopg.Connection) -> None:
    for address in (
        "Ada@Example.ORG",
        "otto@b\u00fccher.example",
        "eva@xn--mller-kva.example",
        "J\u00d6RG@example.org",
    ):
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
        "mailto:j\u00f6rg@example.org",
        "mailto:jo\u0308rg@example.org",
        "mailto:j%C3%B6rg@example.org",
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
    assert row.last_error == "not sent: the suppressed addresses are unknown: UndefinedFunction 42883"


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


async def test_a_handler_of_a_shared_transaction_does_not_begin_after_the_one_before_it(
    dsn: str, db: psycopg.Connection
) -> None:
    """All of its messages have begun their transaction together, and their handlers run one after the other."""
    outbox, begun = Outbox(settings_for(dsn)), list[str | None]()

    @outbox.handler(Topic("news", mailing_list="news"), transactional=True, max_size=10)
    async def news(message: Message, ctx: Context) -> None:
        begun.append(message.destination)
        for address in ("ada@example.org", "otto@example.org"):
            Operator(db).suppress(address, "complaint")

    with db.transaction():
        outbox.on(db).enqueue_fanout("news", None, [ADA, "mailto:otto@example.org", ADA])
    await Worker(outbox).run_once()
    assert begun == [ADA]
    assert [row.state for row in rows_of(db)] == ["sent", "skipped", "skipped"]


@pytest.mark.parametrize("is_batch", [False, True])
async def test_no_handler_begins_after_a_middleware_that_has_waited(
    dsn: str, db: psycopg.Connection, is_batch: bool
) -> None:
    outbox, begun = Outbox(settings_for(dsn)), list[str | None]()

    @outbox.middleware
    async def wait(
        messages: Sequence[Message], call_next: Callable[[], Awaitable[Sequence[Outcome]]]
    ) -> Sequence[Outcome]:
        Operator(db).suppress("ada@example.org", "complaint")
        return await call_next()

    topic = Topic("news", mailing_list="news")
    if is_batch:

        @outbox.batch_handler(topic)
        async def batch(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
            begun.extend(message.destination for message in messages)

    else:

        @outbox.handler(topic)
        async def news(message: Message, ctx: Context) -> None:
            begun.append(message.destination)

    with db.transaction():
        outbox.on(db).enqueue_fanout("news", None, [ADA, "mailto:otto@example.org"])
    await Worker(outbox).run_once()
    assert begun == ["mailto:otto@example.org"]
    assert [row.state for row in rows_of(db)] == ["skipped", "sent"]


async def test_a_lock_on_the_list_holds_back_no_mail_of_the_account(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    """Also not if mails of the list occupy all slots: they give them back."""
    repair, (outbox, begun) = connect(), outbox_of(dsn, concurrency=5)
    repair.execute("LOCK TABLE pgoutbox.suppression")
    with db.transaction():
        outbox.on(db).enqueue_fanout("news", None, [ADA] * 20)
    reset_id = enqueue(db, "reset", destination=ADA)
    async with running(Worker(outbox)):
        await until(lambda: state_of(db, reset_id) == "sent")
        later_id = enqueue(db, "reset", destination=ADA)
        await until(lambda: state_of(db, later_id) == "sent")
        assert begun == [f"reset {ADA}"] * 2
        (news, *_) = rows_of(db)
        assert news.last_error == "not sent: the suppressed addresses are unknown: LockNotAvailable 55P03"
        repair.rollback()


async def test_a_new_secret_lifts_no_suppression(dsn: str, db: psycopg.Connection) -> None:
    """As after a restore of the rows alone, or after the loss of the secret."""
    operator = Operator(db)
    operator.suppress("ada@example.org", "bounce")
    (of_another,) = operator.list_suppressions()
    db.execute("UPDATE pgoutbox.secret SET key = sha256(key)")
    outbox, begun = outbox_of(dsn)
    message_id, reset_id = (enqueue(db, topic, destination=ADA) for topic in ("news", "reset"))
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, state_of(db, reset_id), begun) == ("pending", "sent", [f"reset {ADA}"])
    unknown = "not sent: the suppressed addresses are unknown: "
    assert row.last_error == f"{unknown}the suppressed addresses are those of another pgoutbox.secret"
    with pytest.raises(ArgumentError, match=r"^items\[0\]\.digest: is one of another database"):
        operator.import_suppressions([{"digest": of_another.digest, "reason": "bounce"}])
    db.execute("DELETE FROM pgoutbox.suppression")
    assert await deliver(dsn, db, ADA) == ["sent"]


async def test_a_direct_send_is_stopped_too(dsn: str, db: psycopg.Connection) -> None:
    outbox, begun = outbox_of(dsn)
    Operator(db).suppress("ada@example.org", "complaint")
    outcome = await asend_directly(outbox, "news", None, destination=ADA)
    assert isinstance(outcome, Skip)
    assert begun == []


# --- the table --------------------------------------------------------------------------------------------------------


def test_no_table_has_an_address(dsn: str, db: psycopg.Connection) -> None:
    operator = Operator(db, actor="olga")
    operator.suppress("mailto:Ada@example.org", "bounce")
    operator.import_suppressions([{"address": "otto@example.org", "reason": "manual"}])
    operator.unsuppress("otto@example.org")
    dump = dump_of(dsn).lower()
    assert "ada@" not in dump
    assert "otto@" not in dump
    digests = [digest for (digest,) in db.execute("SELECT digest FROM pgoutbox.suppression")]
    assert [dump.count(digest) for digest in digests] == [1, 1]  # And none in the audit.


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
    operator.suppress("ada@example.org", "bounce")
    operator.suppress("ada@example.org", "unsubscribe", mailing_list="news")
    operator.suppress("otto@example.org", "manual", mailing_list="news")
    operator.unsuppress("otto@example.org", mailing_list="news")
    exported = [
        one._asdict() | {"created_at": one.created_at.isoformat()} for one in operator.list_suppressions(limit=None)
    ]
    assert [(one["mailing_list"], one["reason"]) for one in exported] == [("news", "unsubscribe"), (None, "bounce")]
    db.execute("DELETE FROM pgoutbox.suppression")
    assert [operator.import_suppressions(exported) for _ in range(2)] == [2, 0]
    again = [one._asdict() | {"created_at": one.created_at.isoformat()} for one in operator.list_suppressions()]
    assert again == exported
    assert len(operator.list_suppressions(address="ADA@example.org")) == 2
    assert operator.list_suppressions(address="otto@example.org") == []


def test_an_import_does_not_end_a_later_subscription(db: psycopg.Connection) -> None:
    operator = Operator(db)
    operator.suppress("ada@example.org", "unsubscribe", mailing_list="news")
    exported = [
        one._asdict() | {"created_at": one.created_at.isoformat()} for one in operator.list_suppressions(limit=None)
    ]
    operator.unsuppress("ada@example.org", mailing_list="news")
    assert operator.import_suppressions(exported) == 0
    assert operator.list_suppressions() == []
    assert operator.import_suppressions([{"address": "ada@example.org", "reason": "bounce"}]) == 1


@pytest.mark.parametrize(
    ("item", "error"),
    [
        ({"digest": "12", "reason": "bounce"}, "digest: must be 40 hexadecimal digits"),
        ({"reason": "bounce"}, "address: must not be null"),
        ({"address": "otto@example.org"}, "reason: must not be null"),
        ({"address": "otto", "reason": "bounce"}, "address: must be one e-mail address"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_import_names_its_first_wrong_item_and_keeps_none_of_its_batch(
    db: psycopg.Connection, item: dict[str, str], error: str, batch_size: int
) -> None:
    operator = Operator(db)
    items: list[Any] = [{"address": "ada@example.org", "reason": "bounce"}, item, {"digest": "7"}]
    with pytest.raises(ArgumentError, match=rf"^items\[1\]\.{error}"):
        operator.import_suppressions(items, batch_size=batch_size)
    assert len(operator.list_suppressions()) == 2 - batch_size


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"address": "ada"}, "address: must be one e-mail address"),
        ({"address": "Ada <ada@example.org>"}, "address: must be one e-mail address"),
        ({"address": "a@b@example.org"}, "address: must be one e-mail address"),
        ({"address": "ada@stra\u00dfe.example"}, "address: give a domain with U\\+00DF in its xn-- form"),
        ({"address": "ada@example.org."}, "address: the part after @ is not a domain"),
        ({"address": "mailto:Ada%20Lee%20%3Cada@example.org%3E"}, "address: must be one e-mail address"),
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


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("\u00e4da@example.org", "address: must be ASCII"),
        ("ada@b\u00fccher.example", "address: must be ASCII, with the domain in its xn-- form"),
        ("ada@example.org.", "address: must be one e-mail address"),
        ("mailto:ann%2Bnews@example.org", "address: must not be percent-encoded"),
        ("Ada <ada@example.org>", "address: must be one e-mail address"),
    ],
)
def test_sql_refuses_an_address_in_another_form(db: psycopg.Connection, address: str, error: str) -> None:
    for statement in ("SELECT pgoutbox.suppress(%s, 'manual')", "SELECT pgoutbox.unsuppress(%s)"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f": {error}"):
            db.execute(statement, [address])
    for one in ("mailto:ADA@example.org", "ann%2Bnews@example.org"):
        assert db.execute("SELECT pgoutbox.suppress(%s, 'manual')", [one]).fetchone() == (True,)
        assert Operator(db).list_suppressions(address=one.lower())


@pytest.mark.parametrize("owner", ["ada", None])
async def test_an_erased_person_gets_no_mail(dsn: str, db: psycopg.Connection, owner: str | None) -> None:
    """Her other messages may be left: in flight, locked, or of another owner."""
    operator = Operator(db)
    operator.suppress("ada@example.org", "unsubscribe", mailing_list="news")
    for one in ("ada", "otto"):
        enqueue(db, "news", destination="mailto:Ada@example.org", owner=one)
    operator.erase(owner=owner, destination="ada@example.org" if owner is None else None)
    assert await deliver(dsn, db, ADA) == ["skipped"]
    assert {row.state for row in rows_of(db)} == {"skipped"}
