"""Tests that everything of a person is erased, and nothing of anybody else, whatever happens at the same time.

Each scenario of a guard runs twice: with the functions of the schema, where it must hold, and without the guard,
where it must fail.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, LiteralString

import psycopg
import pytest
from cryptography.fernet import Fernet
from psycopg.types.json import Jsonb

from pgoutbox import ConfigurationError, Context, Failure, Message, Outbox, Permanent, Topic
from pgoutbox.message import State
from pgoutbox.operations import Action, EraseResult, Mention, MessageFilter, Operator
from pgoutbox.worker import Worker
from tests.support import races
from tests.support.dump import dump_of
from tests.support.messages import ADD_ATTEMPT, LARGE, PUT_FINAL, SET_LAST_ERROR, put
from tests.support.outbox_actions import enqueue, row_of, rows_of, settings_for, state_of
from tests.support.worker_sql import claim, finish_sent

if TYPE_CHECKING:
    from pydantic import JsonValue

    from pgoutbox.options import MessageOptions
    from tests.conftest import Connect

DAY = timedelta(days=1)
OWNER = "person-4711"
ADA = "mailto:ada@example.org"
BOB = "mailto:bob@example.org"
KEY = Fernet.generate_key().decode()


def remove(db: psycopg.Connection, function: str, guard: str, instead: str = "") -> None:
    """Remove a guard from a function of the schema."""
    ((definition,),) = db.execute("SELECT pg_get_functiondef(%s::regproc)", [f"pgoutbox.{function}"]).fetchall()
    assert definition.count(guard) == 1, definition.count(guard)
    db.execute(definition.replace(guard, instead).encode())


def put_of(db: psycopg.Connection, state: State = State.PENDING, *, owner: str = OWNER, **options: Any) -> int:  # noqa: ANN401 - those of put
    """Bring a message of an owner to a state."""
    message_id = put(db, state, destination=ADA, **options)
    db.execute("UPDATE pgoutbox.message SET owner = %s WHERE id = %s", [owner, message_id])
    return message_id


def finalize(db: psycopg.Connection, message_id: int, state: State, age: timedelta = timedelta()) -> None:
    db.execute(PUT_FINAL, {"id": message_id, "state": state.value, "age": age})


def results(db: psycopg.Connection, **chosen: object) -> dict[int, str]:
    names = ", ".join(f"{name} => %({name})s" for name in chosen)
    return dict(db.execute(f"SELECT * FROM pgoutbox.erase({names})".encode(), chosen).fetchall())


def count(db: psycopg.Connection, table: LiteralString) -> int:
    ((number,),) = db.execute(f"SELECT count(*) FROM pgoutbox.{table}".encode()).fetchall()
    return int(number)


# --- everything of one person -----------------------------------------------------------------------------------------


def live_of_a_person(outbox: Outbox, db: psycopg.Connection, owner: str, address: str, name: str) -> list[int]:
    """Enqueue messages of every kind. Their keys, payloads and headers contain the name of the person."""
    payload: JsonValue = {"to": name}
    common: MessageOptions = {"destination": address, "owner": owner}
    items: list[tuple[str, JsonValue, MessageOptions]] = [
        ("mail", payload, common),
        ("mail", payload, {**common, "delay": 3600}),
        ("mail", {"to": name, **LARGE}, common),
        ("mail", payload, {**common, "headers": {"x-to": name}}),
        ("reset", payload, {**common, "dedupe_key": f"reset-{name}"}),
        ("mail", payload, {**common, "dedupe_key": f"dedupe-{name}"}),
        ("mail", payload, {**common, "coalesce_key": f"coalesce-{name}"}),
        ("mail", payload, {**common, "coalesce_key": f"coalesce-{name}"}),
        ("mail", payload, {**common, "ordering_key": f"ordering-{name}"}),
    ]
    with db.transaction():
        ids = [outbox.on(db).enqueue(topic, body, **options).id for topic, body, options in items]
        shared = outbox.on(db).enqueue_fanout("news", None, destinations=[address], content={"dear": name}, owner=owner)
    return ids + [one.id for one in shared]


def history_of_a_person(outbox: Outbox, db: psycopg.Connection, owner: str, address: str, name: str) -> list[int]:
    """Leave messages in every final state, attempts, a copy, acts, and a retired partition."""
    ids = live_of_a_person(outbox, db, owner, address, name)
    for state in (State.SENT, State.FAILED, State.SKIPPED, State.CANCELLED):
        done = live_of_a_person(outbox, db, owner, address, name + state)
        for message_id in done:
            finalize(db, message_id, state)
            db.execute(ADD_ATTEMPT, (message_id, 1))
        ids += done
        db.execute(SET_LAST_ERROR, (f"550 {address}", done))
        db.execute("UPDATE pgoutbox.message SET last_error = %s WHERE id = ANY (%s)", [f"550 {address}", done])
    operator = Operator(db, actor="olga")
    operator.act_on_all("resend", MessageFilter(owner=owner, states=[State.SENT], topic="news"))
    operator.act_on_all(
        "redrive", MessageFilter(destination=address.removeprefix("mailto:"), key=f"dedupe-{name}failed")
    )
    operator.act_on_all("dismiss", MessageFilter(owner=owner, topic="reset"), reason=f"{address} is closed")
    operator.cancel_by_key("mail", dedupe_key=f"dedupe-{name}")
    copies = db.execute("SELECT id FROM pgoutbox.message WHERE resend_of = ANY (%s)", [ids]).fetchall()
    return ids + [message_id for (message_id,) in copies]


def failures_of_a_person(outbox: Outbox, db: psycopg.Connection, owner: str, address: str, name: str) -> list[int]:
    """Fail messages of a topic with a hook, and return them with the messages of the hook. One of them is deleted."""
    queue = f"bounces-{name[0]}"  # The row of the run keeps it: names of queues are settings, and name no person.
    options: MessageOptions = {"destination": address, "owner": owner, "queue": queue}
    with db.transaction():
        ids = [outbox.on(db).enqueue("bounce", {"to": name} | more, **options).id for more in ({}, LARGE, {"gone": 1})]
    asyncio.run(Worker(outbox, queues=[queue]).run_once())
    query = "SELECT id FROM pgoutbox.message WHERE failure_of = ANY (%s)"
    hooks = [hook_id for (hook_id,) in db.execute(query, [ids]).fetchall()]
    assert [{row.state for row in rows_of(db, *some)} for some in (ids, hooks)] == [{"failed"}, {"sent"}]
    db.execute("DELETE FROM pgoutbox.message WHERE id = %s", [ids[-1]])
    copy = Operator(db).resend(hooks[0]).other_id
    assert copy is not None
    return [*ids[:-1], *hooks, copy]


def with_hook(outbox: Outbox) -> Outbox:
    @outbox.handler("bounce")
    async def bounce(message: Message, ctx: Context) -> None:
        raise Permanent(f"550 {message.destination}")

    @outbox.on_failed("bounce")
    async def note(message: Message[Failure], ctx: Context) -> None: ...

    return outbox


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [{"owner": OWNER}, {"destination": "ada@example.org"}, {"destination": ADA}])
def test_a_dump_contains_nothing_of_an_erased_person(db: psycopg.Connection, dsn: str, chosen: dict[str, str]) -> None:
    outbox = with_hook(Outbox(settings_for(dsn, encryption_keys=KEY)))
    outbox.define(Topic("reset", encrypted=True))
    ids = history_of_a_person(outbox, db, OWNER, ADA, "lovelace")
    others = history_of_a_person(outbox, db, "person-42", BOB, "babbage")
    ids += failures_of_a_person(outbox, db, OWNER, ADA, "lovelace")
    others += failures_of_a_person(outbox, db, "person-42", BOB, "babbage")
    alert = enqueue(db, "pgoutbox.alert", {"breaker": "smtp", "error": f"550 {ADA} unknown"})
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES ('smtp', now(), 5, 'w', '550 Ada@Example.org unknown')"
    )
    attempts = others_of(db, others)
    before = dump_of(dsn)
    assert all(text in before for text in ("lovelace", "ada@example.org", OWNER))

    done = Operator(db, actor="olga").erase(**chosen)  # type: ignore[arg-type]

    assert done.is_complete
    assert done.results == dict.fromkeys(ids, EraseResult.ERASED)
    assert done.mentions == [Mention("message", "payload", alert)]
    assert Operator(db).erase(ids=[alert]).mentions == []
    after = dump_of(dsn).lower()
    for text in ("lovelace", "ada@example.org", OWNER):
        assert text not in after
    # Nothing of anybody else is gone.
    assert others_of(db, others) == attempts
    assert [row.id for row in rows_of(db)] == sorted(others)
    for text in ("dedupe-babbage", "coalesce-babbage", "ordering-babbage", "person-42", "babbage"):
        assert before.count(text) == dump_of(dsn).count(text), text


def test_an_erasure_locks_no_breaker_of_another_person(connect: Connect, db: psycopg.Connection) -> None:
    """Workers would wait for it, with the messages of all topics behind them."""
    eraser, worker = connect(), connect(autocommit=True)
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES ('smtp', now(), 5, 'w', '550 bob@example.org unknown')"
    )
    enqueue(db, owner=OWNER)
    eraser.execute("SELECT")  # Begun here, so that the erasure stays open.
    assert Operator(eraser).erase(owner=OWNER).is_complete
    worker.execute("SELECT FROM pgoutbox.breaker FOR UPDATE NOWAIT")


def others_of(db: psycopg.Connection, ids: list[int]) -> list[tuple[object, ...]]:
    """Return the attempts of messages."""
    return db.execute(
        "SELECT * FROM pgoutbox.attempt_view WHERE message_id = ANY (%s) ORDER BY message_id, attempt_count", [ids]
    ).fetchall()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "part", "instead"),
    [
        ("_erase_in_audit", "    WITH told", "    RETURN 0;\n    WITH told"),
        ("_erase_left_behind", "WHERE h.scope = a.scope\n", "WHERE false\n"),
    ],
)
def test_the_dump_shows_a_part_that_is_not_erased(
    db: psycopg.Connection, dsn: str, missing: str, part: str, instead: str
) -> None:
    """The audit and the keys each need their part of the erasure."""
    message_id = put_of(db, State.FAILED, coalesce_key="lovelace")
    Operator(db).act_on_all("redrive", MessageFilter(owner=OWNER))
    remove(db, missing, part, instead)
    assert Operator(db).erase(owner=OWNER).results[message_id] is EraseResult.ERASED
    after = dump_of(dsn)
    assert "lovelace" in after or OWNER in after


@pytest.mark.slow
def test_the_dump_shows_the_message_of_a_hook_that_is_not_erased(db: psycopg.Connection, dsn: str) -> None:
    failures_of_a_person(with_hook(Outbox(settings_for(dsn))), db, OWNER, ADA, "lovelace")
    remove(db, "_belongs_to", "(message).failure_of IS NOT NULL", "false")
    Operator(db).erase(destination=ADA)
    assert "lovelace" in dump_of(dsn)


@pytest.mark.slow
def test_ids_select_the_messages_of_their_hooks(db: psycopg.Connection, dsn: str) -> None:
    outbox = with_hook(Outbox(settings_for(dsn)))
    failed, *others = failures_of_a_person(outbox, db, OWNER, ADA, "lovelace")
    query = "SELECT id FROM pgoutbox.message WHERE failure_of = %s"
    hooks = [hook_id for (hook_id,) in db.execute(query, [failed]).fetchall()]
    assert len(hooks) == 2
    assert Operator(db).count_erasable(ids=[failed]) == {State.FAILED: 1, State.SENT: 1, State.PENDING: 1}
    assert [one["id"] for one in Operator(db).export(ids=[failed])] == [failed, *hooks]
    assert results(db, ids=[failed]) == dict.fromkeys([failed, *hooks], "erased")
    assert [row.id for row in rows_of(db)] == sorted({*others} - {*hooks})


# --- each way to select -----------------------------------------------------------------------------------------------


def test_exactly_one_way_of_selecting_is_necessary(rolled_back: psycopg.Connection) -> None:
    operator = Operator(rolled_back)
    for chosen in ({}, {"ids": [1], "owner": OWNER}, {"owner": OWNER, "destination": ADA}):
        with pytest.raises(ConfigurationError, match="ids, owner, destination: give exactly one"):
            operator.erase(**chosen)
        with (
            pytest.raises(psycopg.errors.InvalidParameterValue, match="owner: give exactly one of ids, owner and"),
            rolled_back.transaction(),
        ):
            results(rolled_back, **chosen)
    with pytest.raises(ConfigurationError, match="owner: must not be empty"):
        operator.erase(owner="")


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize("chosen", ["'{1}'", "NULL, 'person-4711'"])
def test_an_index_finds_ids_and_owners(rolled_back: psycopg.Connection, chosen: str, *, is_guarded: bool) -> None:
    """A plan for any arguments would read all messages."""
    if not is_guarded:
        remove(rolled_back, "_selected_messages", " SET plan_cache_mode TO 'force_custom_plan'\n")
    rolled_back.execute("SET LOCAL enable_seqscan = off")
    rolled_back.execute("SET LOCAL plan_cache_mode = force_generic_plan")
    scans = "SELECT sum(seq_scan) FROM pg_stat_xact_user_tables WHERE relname LIKE 'message%'"
    before = rolled_back.execute(scans).fetchone()
    rolled_back.execute(f"SELECT FROM pgoutbox._selected_messages({chosen})".encode())
    assert (rolled_back.execute(scans).fetchone() == before) is is_guarded


@pytest.mark.parametrize("state", sorted(State))
def test_a_message_in_every_state_is_erased_or_asked_to_stop(rolled_back: psycopg.Connection, state: State) -> None:
    message_id = put(rolled_back, state)
    is_in_flight = state is State.SENDING
    assert results(rolled_back, ids=[message_id]) == {message_id: "in_flight" if is_in_flight else "erased"}
    assert [row.is_cancel_requested for row in rows_of(rolled_back)] == [True] * is_in_flight


def test_a_missing_message_is_named(rolled_back: psycopg.Connection) -> None:
    assert results(rolled_back, ids=[2**40]) == {2**40: "missing"}


def test_the_audit_has_the_ids_and_not_the_owner(db: psycopg.Connection) -> None:
    ids, flying = [put_of(db), put_of(db, State.SENT)], put_of(db, State.SENDING)
    Operator(db, actor="olga", origin="portal").erase(owner=OWNER)
    cancelled, erased = reversed(Operator(db).list_acts())
    assert (cancelled.action, cancelled.first_ids) == (Action.CANCEL, [flying])
    assert (erased.action, erased.actor, erased.origin, erased.first_ids) == (Action.ERASE, "olga", "portal", ids)
    assert erased.details == cancelled.details == {"by": "owner"}


def test_messages_are_erased_in_batches_with_progress(db: psycopg.Connection) -> None:
    ids = [put_of(db) for _ in range(5)]
    seen: list[int] = []
    done = Operator(db).erase(owner=OWNER, batch_size=2, progress=seen.append)
    assert (list(done.results), seen) == (ids, [2, 4, 5])
    assert [act.message_count for act in Operator(db).list_acts()] == [1, 2, 2]
    assert len({act.act_id for act in Operator(db).list_acts()}) == 1


def test_a_dry_run_changes_nothing(db: psycopg.Connection) -> None:
    message_id = put_of(db, State.FAILED)
    operator = Operator(db)
    assert operator.count_erasable(owner=OWNER) == {State.FAILED: 1}
    with operator.dry_run():
        assert operator.erase(owner=OWNER).results == {message_id: "erased"}
    assert (state_of(db, message_id), operator.list_acts()) == ("failed", [])


def test_a_selection_without_messages_still_clears_the_audit(db: psycopg.Connection) -> None:
    other = put(db, State.FAILED, destination=BOB)
    Operator(db).dismiss(other, f"same mailbox as {ADA}, not bada@example.org")
    Operator(db).erase(destination="ada@example.org")
    (act,) = Operator(db).list_acts(action=Action.DISMISS)
    assert act.details == {"reason": "same mailbox as (erased), not bada@example.org"}


def test_a_fair_key_that_names_the_person_is_erased_in_the_audit(db: psycopg.Connection) -> None:
    """A key that many share, such as a tenant, is not the person, even if the erased message has it."""
    keys = ("acme", OWNER, "ada@example.org", "user ada@example.org", "bada@example.org")
    for key in keys:
        Operator(db).set_fair_share("mail", key, max_in_flight=0)
    db.execute("SELECT pgoutbox.enqueue('mail', '1', owner => %s, destination => %s, fair_key => 'acme')", [OWNER, ADA])
    Operator(db).erase(owner=OWNER)
    acts = [act.details or {} for act in Operator(db).list_acts(action=Action.PAUSE)]
    assert [act["fair_key"] for act in reversed(acts)] == [
        "acme", "(erased)", "(erased)", "user (erased)", "bada@example.org",
    ]  # fmt: skip
    assert {act["max_in_flight"] for act in acts} == {0}


def test_an_erasure_that_only_changes_acts_leaves_a_trace(db: psycopg.Connection) -> None:
    Operator(db).dismiss(put(db, State.FAILED), "ask bob@example.org")
    Operator(db, actor="olga").erase(destination=BOB)
    Operator(db, actor="olga").erase(destination="mailto:unused@example.org")
    erased, dismissed = Operator(db).list_acts()
    assert dismissed.details == {"reason": "ask (erased)"}
    assert (erased.action, erased.actor, erased.message_count, erased.first_ids, erased.details) == (
        Action.ERASE, "olga", None, None, {"by": "destination"},
    )  # fmt: skip


def test_an_erasure_compares_equal_details_of_acts_once(rolled_back: psycopg.Connection) -> None:
    """Each comparison costs microseconds for each text, and an audit may have a million acts."""
    db = rolled_back
    db.execute("SET LOCAL track_functions = 'all'")
    db.execute(
        "INSERT INTO pgoutbox.audit (act_id, actor, action, message_ids, message_count, stated)"
        """ SELECT gen_random_uuid(), 'olga', 'redrive', '{1}', 1, '{"text": "greet"}' FROM generate_series(1, 50)"""
    )
    results(db, owner="greetings")
    ((calls,),) = db.execute("SELECT pg_stat_get_xact_function_calls('pgoutbox._erased_text'::regproc)").fetchall()
    assert not calls


@pytest.mark.parametrize("is_guarded", [True, False])
def test_of_two_erasures_the_last_one_erases_a_shared_content(
    db: psycopg.Connection, connect: Connect, *, is_guarded: bool
) -> None:
    """Neither sees that the other has deleted its message, and both answer `erased`."""
    if not is_guarded:
        remove(db, "_erase", "ORDER BY c.id\n    FOR UPDATE;", "LIMIT 0;")
    first, second = connect(), connect()
    rows = db.execute(
        'SELECT f.id FROM pgoutbox.enqueue_fanout(\'{"topic": "greet", "payload": null}\', %s, \'{}\') AS f',
        (Jsonb([ADA, BOB]),),
    ).fetchall()
    ids = [row[0] for row in rows]
    assert results(first, destination=ADA) == {ids[0]: "erased"}
    with ThreadPoolExecutor(1) as pool:
        erasing = pool.submit(results, second, destination=BOB)
        if is_guarded:
            races.until_blocked(db, second, erasing)
        else:
            erasing.result()
        first.commit()
        assert erasing.result() == {ids[1]: "erased"}
    second.commit()
    assert count(db, "content") == (0 if is_guarded else 1)


def test_an_erased_message_clears_only_its_own_acts(db: psycopg.Connection) -> None:
    mine, other = put_of(db, State.FAILED), put_of(db, State.FAILED)
    Operator(db).act_on_all("redrive", MessageFilter(key="none", destination="ada@example.org"))
    for message_id in (mine, other):
        Operator(db).dismiss(message_id, "closed: ada@example.org")
    Operator(db).erase(ids=[mine])
    reasons = [act.details for act in Operator(db).list_acts(action=Action.DISMISS)]
    assert reasons == [{"reason": "closed: ada@example.org"}, {"reason": "closed: (erased)"}]


def test_an_erasure_adds_no_reason_to_an_act_without_one(db: psycopg.Connection) -> None:
    with db.transaction():
        db.execute("""SELECT pgoutbox.announce_act(stated => '{"note": "asked by ada@example.org"}')""")
        db.execute("SELECT pgoutbox.set_retention('mail', 'sent', interval '1 day')")
    (before,) = Operator(db).list_acts()
    Operator(db).erase(destination=ADA)
    (act,) = Operator(db).list_acts(action=Action.RETENTION)
    assert (act.details, act.stated) == (before.details, {"note": "asked by (erased)"})


def test_rows_that_outlived_their_message_are_erased_by_its_id(db: psycopg.Connection, dsn: str) -> None:
    """As after a message that was deleted as it was sent: its dedupe key stays."""
    gone = [put(db, dedupe_key="lovelace", coalesce_key="lovelace"), put(db, ordering_key="lovelace")]
    db.execute("DELETE FROM pgoutbox.message")
    found = [
        Mention("dedupe", "dedupe_key", gone[0]),
        Mention("key_head", "key", gone[0]),
        Mention("key_head", "key", gone[1]),
    ]
    assert Operator(db).mentions("lovelace") == found
    assert Operator(db).erase(ids=gone).results == dict.fromkeys(gone, "erased")
    assert "lovelace" not in dump_of(dsn)
    assert Operator(db).erase(ids=gone).results == dict.fromkeys(gone, "missing")


@pytest.mark.slow
async def test_the_key_of_a_message_that_was_deleted_as_it_was_sent_is_erased_by_its_owner(
    outbox: Outbox, db: psycopg.Connection, dsn: str
) -> None:
    @outbox.handler("mail")
    async def mail(message: Message, ctx: Context) -> None:
        """Send nothing."""

    operator = Operator(db)
    operator.set_retention("mail", "sent", timedelta())

    def welcome(name: str, owner: str | None) -> int:
        return enqueue(db, "mail", owner=owner, dedupe_key=f"welcome-{name}")

    mine, other, nobodys = welcome("lovelace", OWNER), welcome("babbage", "other"), welcome("turing", None)
    await Worker(outbox).run_once()
    assert count(db, "message") == 0
    operator.act_on_all("redrive", MessageFilter(key="welcome-lovelace"))  # The audit has the key, too.
    assert operator.mentions(OWNER) == [Mention("dedupe", "owner", mine)]
    assert operator.erase(owner=OWNER).results == {mine: "erased"}
    dump = dump_of(dsn)
    assert [text for text in ("lovelace", OWNER, "babbage", "turing") if text in dump] == ["babbage", "turing"]
    assert [act.action for act in operator.list_acts(message_id=mine)] == [Action.ERASE]
    kept = db.execute("SELECT message_id, owner FROM pgoutbox.dedupe ORDER BY message_id").fetchall()
    assert kept == [(other, "other"), (nobodys, None)]
    assert operator.erase(owner=OWNER).results == {}


def test_the_copies_of_an_erased_message_are_named(db: psycopg.Connection) -> None:
    sent = put(db, State.SENT)
    copy = Operator(db).resend(sent).other_id
    assert Operator(db).erase(ids=[sent]).mentions == [Mention("message", "resend_of", copy)]


def test_a_role_that_may_not_read_payloads_gets_no_mentions(db: psycopg.Connection) -> None:
    message_id = put_of(db)
    with db.transaction(force_rollback=True):
        db.execute("SET LOCAL ROLE pgoutbox_operator")
        done = Operator(db).erase(owner=OWNER)
        assert (done.results, done.mentions) == ({message_id: "erased"}, None)


def test_mentions_are_found_in_every_column(db: psycopg.Connection) -> None:
    text = 'Käthe "K" o\'Neil (x)'
    ids = [put(db, State.FAILED) for _ in range(4)]
    db.execute(
        "UPDATE pgoutbox.message SET last_error = %s WHERE id = %s", [f"no {text.replace('the', 'THE')}!", ids[0]]
    )
    db.execute("UPDATE pgoutbox.message SET headers = jsonb_build_object('to', %s::text) WHERE id = %s", [text, ids[1]])
    db.execute(ADD_ATTEMPT, (ids[2], 1))
    db.execute(SET_LAST_ERROR, (text, [ids[2]]))
    db.execute("UPDATE pgoutbox.message SET payload = jsonb_build_array(%s::text) WHERE id = %s", [text, ids[3]])
    db.execute("INSERT INTO pgoutbox.content (body) VALUES (jsonb_build_object('to', %s::text))", [text])
    assert Operator(db).mentions(text) == [
        Mention("content", "body", 1),
        Mention("message", "attempts", ids[2]),
        Mention("message", "headers", ids[1]),
        Mention("message", "last_error", ids[0]),
        Mention("message", "payload", ids[3]),
    ]
    assert Operator(db).mentions("Käth", "") == []


# --- keys that others need --------------------------------------------------------------------------------------------

HEAD_LIVE = "JOIN asked AS a ON a.scope = m.topic AND a.key = m.coalesce_key\n"
HEAD_FAILED = "AND m.coalesce_key = key\n"
HEAD_CANCELLED = "AND m.coalesce_key = key AND m.state = 'cancelled'"
NEVER = " AND false"


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize(
    ("state", "guard", "instead"),
    [
        (State.PENDING, HEAD_LIVE, HEAD_LIVE.rstrip() + NEVER + "\n"),
        (State.FAILED, HEAD_FAILED, HEAD_FAILED.rstrip() + NEVER + "\n"),
        (State.CANCELLED, HEAD_CANCELLED, HEAD_CANCELLED + NEVER),
    ],
)
def test_an_older_message_of_another_owner_stays_superseded(
    db: psycopg.Connection, state: State, guard: str, instead: str, *, is_guarded: bool
) -> None:
    if not is_guarded:
        remove(db, "_erase_left_behind" if guard == HEAD_LIVE else "_messages_of_key", guard, instead)
    older = put_of(db, state, owner="other", coalesce_key="k")
    put_of(db, coalesce_key="k")
    Operator(db).erase(owner=OWNER)
    if state is State.PENDING:
        claim(db, topics=["mail"])
        assert state_of(db, older) == ("skipped" if is_guarded else "sending")
    else:
        assert Operator(db).redrive(older).is_done is not is_guarded
    assert count(db, "key_head") == is_guarded


ORDERED = "m.queue = substr(scope, 2) AND m.ordering_key = key"


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize("state", [State.PENDING, State.FAILED, State.CANCELLED])
def test_the_ordering_key_of_an_older_message_stays(db: psycopg.Connection, state: State, *, is_guarded: bool) -> None:
    if not is_guarded:
        ((definition,),) = db.execute("SELECT pg_get_functiondef('pgoutbox._messages_of_key'::regproc)").fetchall()
        assert definition.count(ORDERED) == 3
        db.execute(definition.replace(ORDERED, "false").encode())
    put_of(db, state, owner="other", ordering_key="k")
    put_of(db, ordering_key="k")
    Operator(db).erase(owner=OWNER)
    assert count(db, "key_head") == is_guarded


def test_the_newest_message_of_another_owner_keeps_its_keys(db: psycopg.Connection) -> None:
    put_of(db, coalesce_key="k")
    put_of(db, ordering_key="k")
    newest = put_of(db, State.SENT, owner="other", coalesce_key="k")
    put_of(db, State.SENT, owner="other", ordering_key="k")
    Operator(db).erase(owner=OWNER)
    assert count(db, "key_head") == 2
    assert Operator(db).resend(newest).is_done


def test_a_dedupe_key_that_a_later_message_has_taken_stays(outbox: Outbox, db: psycopg.Connection) -> None:
    put_of(db, State.CANCELLED, dedupe_key="k")
    later = put(db, dedupe_key="k")
    Operator(db).erase(owner=OWNER)
    again = outbox.on(db).enqueue("mail", {"to": "ada"}, dedupe_key="k", require_transaction=False)
    assert (again.duplicate, again.id) == (True, later)


def test_the_content_of_a_fan_out_stays_for_its_other_messages(outbox: Outbox, db: psycopg.Connection) -> None:
    with db.transaction():
        outbox.on(db).enqueue_fanout("news", None, [ADA, BOB], content="shared")
    Operator(db).erase(destination=ADA)
    assert count(db, "content") == 1
    Operator(db).erase(destination=BOB)
    assert count(db, "content") == 0


def test_messages_behind_an_erased_one_are_claimable(db: psycopg.Connection, connect: Connect) -> None:
    head = put_of(db, State.FAILED, ordering_key="k")
    db.execute("UPDATE pgoutbox.message_failed SET halts_key = true WHERE id = %s", [head])
    behind = put(db, ordering_key="k")
    view = "SELECT reason FROM pgoutbox.waiting_view WHERE id = %s"
    assert db.execute(view, [behind]).fetchone() == ("halted",)
    listener = connect(autocommit=True)
    listener.execute("LISTEN pgoutbox")
    Operator(db).erase(owner=OWNER)
    assert db.execute(view, [behind]).fetchone() == ("no worker",)
    assert [n.payload for n in listener.notifies(timeout=10, stop_after=1)] == ["all default"]


# --- at the same time -------------------------------------------------------------------------------------------------


def test_a_message_that_is_being_claimed_is_left(db: psycopg.Connection, connect: Connect) -> None:
    worker, message_id = connect(), put_of(db)
    (row,) = claim(worker, topics=["mail"])
    assert results(db, owner=OWNER) == {message_id: "locked"}
    worker.commit()
    assert results(db, owner=OWNER) == {message_id: "in_flight"}
    assert finish_sent(worker, (message_id, row.attempt_count)) == {message_id}
    assert results(db, owner=OWNER) == {message_id: "in_flight"}
    worker.commit()
    assert results(db, owner=OWNER) == {message_id: "erased"}
    assert rows_of(db) == []


def test_an_erased_message_is_neither_claimed_nor_finished(db: psycopg.Connection, connect: Connect) -> None:
    eraser, message_id = connect(), put_of(db)
    assert results(eraser, owner=OWNER) == {message_id: "erased"}
    assert claim(db, topics=["mail"]) == []
    eraser.rollback()
    (row,) = claim(db, topics=["mail"])
    assert row.id == message_id


@pytest.mark.parametrize("is_guarded", [True, False])
def test_an_attempt_in_flight_keeps_its_message(db: psycopg.Connection, *, is_guarded: bool) -> None:
    if not is_guarded:
        ((definition,),) = db.execute("SELECT pg_get_functiondef('pgoutbox._erase'::regproc)").fetchall()
        states = "m.state IN ('pending', 'sent', 'failed', 'skipped', 'cancelled')"
        assert definition.count(states) == 2
        db.execute(definition.replace(states, "true").encode())
    message_id = put_of(db)
    (row,) = claim(db, topics=["mail"])
    results(db, owner=OWNER)
    assert finish_sent(db, (message_id, row.attempt_count)) == ({message_id} if is_guarded else set())


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize("options", [{"coalesce_key": "k"}, {"ordering_key": "k"}])
def test_a_message_is_left_while_its_key_is_used(
    db: psycopg.Connection, connect: Connect, options: dict[str, Any], *, is_guarded: bool
) -> None:
    """An open enqueue has the key locked. Without the guard the message goes, and its key stays in the dump."""
    if not is_guarded:
        remove(db, "_erase", "AND (h.scope, h.key) NOT IN", "AND false AND (h.scope, h.key) NOT IN")
    message_id, producer = put_of(db, **options), connect()
    put(producer, **options)
    assert results(db, owner=OWNER) == {message_id: "locked" if is_guarded else "erased"}
    producer.rollback()
    results(db, owner=OWNER)
    assert count(db, "key_head") == (not is_guarded)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_message_is_left_while_an_enqueue_takes_its_dedupe_key(
    db: psycopg.Connection, connect: Connect, *, is_guarded: bool
) -> None:
    if not is_guarded:
        remove(db, "_erase", "AND d.message_id <> ALL (dedupe_ids)", "AND false")
    message_id, producer = put_of(db, State.CANCELLED, dedupe_key="k"), connect()
    later = put(producer, dedupe_key="k")
    db.execute("SET lock_timeout = '10ms'")
    if is_guarded:
        assert results(db, owner=OWNER) == {message_id: "locked"}
    else:
        with pytest.raises(psycopg.errors.LockNotAvailable):
            results(db, owner=OWNER)
    producer.commit()
    assert results(db, owner=OWNER) == {message_id: "erased"}
    assert db.execute("SELECT message_id FROM pgoutbox.dedupe").fetchall() == [(later,)]


def test_an_enqueue_of_the_key_waits_for_an_erasure_and_draws_a_new_key(
    db: psycopg.Connection, connect: Connect
) -> None:
    eraser, producer = connect(), connect(autocommit=True)
    put_of(db, coalesce_key="k")
    results(eraser, owner=OWNER)
    with ThreadPoolExecutor(1) as pool:
        enqueued = pool.submit(put, producer, coalesce_key="k")
        races.until_blocked(db, producer, enqueued)
        eraser.commit()
        newest = enqueued.result()
    assert db.execute("SELECT newest_id FROM pgoutbox.key_head").fetchall() == [(newest,)]
    assert [row.id for row in claim(db, topics=["mail"])] == [newest]


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
def test_a_message_that_is_being_redriven_is_left(db: psycopg.Connection, connect: Connect, state: State) -> None:
    operator, message_id = connect(), put_of(db, state)
    operator.execute("SELECT pgoutbox.redrive(%s)", [[message_id]])
    assert results(db, owner=OWNER) == {message_id: "locked"}
    operator.commit()
    assert (row_of(db, message_id).state, results(db, owner=OWNER)) == ("pending", {message_id: "erased"})


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_message_that_was_redirected_since_it_was_found_stays(db: psycopg.Connection, *, is_guarded: bool) -> None:
    if not is_guarded:
        ((definition,),) = db.execute("SELECT pg_get_functiondef('pgoutbox._erase'::regproc)").fetchall()
        guard = "pgoutbox._belongs_to(m, _erase.owner, _erase.destination)"
        assert definition.count(guard) == 3
        db.execute(definition.replace(guard, "pgoutbox._belongs_to(m, _erase.owner, NULL)").encode())
    message_id, flying = put(db, State.FAILED, destination=BOB), put(db, State.SENDING, destination=BOB)
    rows = db.execute("SELECT * FROM pgoutbox._erase(%s, destination => %s)", [[message_id, flying], ADA]).fetchall()
    expected = ["changed", "changed"] if is_guarded else ["erased", "in_flight"]
    assert rows == list(zip((message_id, flying), expected, strict=True))
    assert row_of(db, flying).is_cancel_requested is not is_guarded
    message_id = put_of(db, State.FAILED, owner="other")
    row = db.execute("SELECT * FROM pgoutbox._erase(%s, owner => %s)", [[message_id], OWNER]).fetchone()
    assert row == (message_id, "changed")


def test_a_resend_and_an_erasure_of_its_source_exclude_each_other(db: psycopg.Connection, connect: Connect) -> None:
    """Otherwise the content of a fan-out could go although the copy needs it."""
    operator, sent = connect(), put_of(db, State.SENT)
    operator.execute("SELECT pgoutbox.resend(%s)", [sent])
    assert results(db, owner=OWNER) == {sent: "locked"}
    operator.commit()
    assert set(results(db, owner=OWNER).values()) == {"erased"}
    assert rows_of(db) == []


WAIT_AT_DELETE: Final = """
    CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock(4711);
        RETURN OLD;
    END
    $$;
    CREATE TRIGGER wait BEFORE DELETE ON pgoutbox.message FOR EACH ROW EXECUTE FUNCTION public.wait()
"""


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_message_that_commits_during_an_erasure_keeps_its_parts(
    db: psycopg.Connection, connect: Connect, *, is_guarded: bool
) -> None:
    """Its id was missing at first, so rows with this id counted as left behind."""
    if not is_guarded:
        remove(
            db, "_erase_left_behind", "WHERE (SELECT m.id FROM pgoutbox.message AS m WHERE m.id = a.id LIMIT 1) IS NULL"
        )
    old = put_of(db)
    db.execute(WAIT_AT_DELETE)
    eraser, gate = connect(autocommit=True), connect()
    gate.execute("SELECT pg_advisory_xact_lock(4711)")
    with ThreadPoolExecutor(1) as pool:
        erased = pool.submit(results, eraser, ids=[old, old + 1])
        races.until_blocked(db, eraser, erased)
        assert enqueue(db, "mail", LARGE, dedupe_key="k") == old + 1
        gate.commit()
        # The message is still there, and nothing of it is gone. It is erased by another call.
        assert erased.result() == {old: "erased", old + 1: "locked" if is_guarded else "erased"}
    assert count(db, "dedupe") == (1 if is_guarded else 0)
    assert state_of(db, old + 1) == "pending"
