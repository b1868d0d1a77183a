"""During a deployment, workers and producers with two versions of a payload run side by side."""

from __future__ import annotations

import asyncio
import json
import textwrap
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from psycopg.types.json import Jsonb
from pydantic import BaseModel

from pgoutbox import (
    ArgumentError,
    ConfigurationError,
    DedupeConflictError,
    EditResult,
    Failure,
    Message,
    NewMessage,
    Outbox,
    Permanent,
    State,
    StateError,
    Topic,
    Worker,
)
from pgoutbox.operations import Correction, Operator
from tests.support.command_line import Done, run_process
from tests.support.outbox_actions import due_earlier, enqueue, rows_of, settings_for
from tests.support.waiting import wait_until
from tests.support.worker_process import is_asleep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.promises.conftest import StartWorker
    from tests.support.worker_process import WorkerProcess

    Way = Callable[[psycopg.Connection, Outbox, Topic[Any], BaseModel], int]

OLD: Final = """
    import asyncio
    import os

    from pydantic import BaseModel

    from pgoutbox import Outbox, Topic

    class Person(BaseModel):
        name: str

    outbox = Outbox()

    @outbox.handler(Topic("mail", payload=Person), transactional=True)
    async def mail(message, ctx):
        while not os.path.exists(os.environ.get("GATE", os.curdir)):
            await asyncio.sleep(0.05)
        await ctx.connection.execute(
            "INSERT INTO handed VALUES (%s, 'old', %s)", [message.id, message.payload.model_dump_json()]
        )
"""
NEW: Final = """
    import asyncio
    import os

    from pydantic import BaseModel

    from pgoutbox import Outbox, Topic

    class Person(BaseModel):
        first: str
        last: str

    def split(payload):
        first, _, last = payload["name"].partition(" ")
        return {"first": first, "last": last}

    outbox = Outbox()

    @outbox.handler(Topic("mail", payload=Person, version=2, upgrade={1: split}), transactional=True)
    async def mail(message, ctx):
        while not os.path.exists(os.environ.get("GATE", os.curdir)):
            await asyncio.sleep(0.05)
        await ctx.connection.execute(
            "INSERT INTO handed VALUES (%s, 'new', %s)", [message.id, message.payload.model_dump_json()]
        )
"""
# Its receiver is unavailable until the gate exists.
SENDS: Final = (
    OLD
    + """
    from pgoutbox import Sent, Unavailable, Webhook

    class Receiver:
        schemes = ("tel",)

        async def send(self, message, content):
            return Sent() if os.path.exists(os.environ["GATE"]) else Unavailable("closed")

        async def aclose(self):
            pass

    outbox = Outbox(transports=[Receiver()])

    @outbox.handler(Topic("mail", payload=Person))
    async def call(message, ctx):
        return Webhook(body={})
"""
)
READ: Final = {"old": '{"name":"Ada Byron"}', "new": '{"first":"Ada","last":"Byron"}'}
EACH: Final = 40


class Person(BaseModel):
    first: str
    last: str


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that handlers with this GATE wait for."""
    return tmp_path / "gate"


@pytest.fixture(autouse=True)
def handed(db: psycopg.Connection) -> None:
    db.execute("CREATE TABLE handed (id bigint, by text, payload text)")


def enqueue_old(db: psycopg.Connection, coalesce_key: str | None = None, ordering_key: str | None = None) -> int:
    return enqueue(db, "mail", {"name": "Ada Byron"}, coalesce_key=coalesce_key, ordering_key=ordering_key)


def enqueue_new(db: psycopg.Connection, coalesce_key: str | None = None, ordering_key: str | None = None) -> int:
    payload = {"first": "Ada", "last": "Byron"}
    return enqueue(db, "mail", payload, payload_version=2, coalesce_key=coalesce_key, ordering_key=ordering_key)


def until_sent(db: psycopg.Connection, ids: Sequence[int], worker: WorkerProcess) -> None:
    query = "SELECT count(*) FROM pgoutbox.message WHERE id = ANY (%s) AND state = 'sent'"
    wait_until(lambda: db.execute(query, [list(ids)]).fetchone() == (len(ids),), lambda: worker.log)


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_a_rolling_deployment_delivers_the_messages_of_both_versions(
    db: psycopg.Connection, start_worker: StartWorker, order: tuple[str, str]
) -> None:
    applications = {"old": OLD, "new": NEW}
    first = start_worker(applications[order[0]])
    wait_until(lambda: "worker_started" in first.events(), lambda: first.log)
    ids = [[enqueue_old(db), enqueue_new(db)] for _ in range(EACH)]
    old, new = (list(each) for each in zip(*ids, strict=True))
    until_sent(db, old, first)
    if order[0] == "old":
        assert {(row.state, row.attempt_count) for row in rows_of(db, *new)} == {("pending", 0)}
    start_worker(applications[order[1]])
    until_sent(db, new, first)
    last = [enqueue_old(db), enqueue_new(db)]
    until_sent(db, last, first)
    found = db.execute("SELECT id, by, payload FROM handed").fetchall()
    assert sorted(message_id for message_id, _, _ in found) == sorted([*old, *new, *last])
    assert {(by, payload) for _, by, payload in found} <= READ.items()
    assert {by for message_id, by, _ in found if message_id in new} == {"new"}
    states = {(row.state, row.attempt_count) for row in rows_of(db, *old, *new, *last)}
    assert states == {("sent", 1)}


def until_begun(db: psycopg.Connection, message_id: int, worker: WorkerProcess) -> None:
    """Wait until the transaction of the handler of a message has begun."""
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
    name = f"pgoutbox attempt {message_id}/1"
    wait_until(lambda: db.execute(query, [name]).fetchone() is not None, lambda: worker.log)


def test_a_version_that_no_worker_knows_waits_and_is_named(
    dsn: str, db: psycopg.Connection, start_worker: StartWorker
) -> None:
    worker = start_worker(OLD)
    message_id = enqueue_new(db)
    known_id = enqueue_old(db)
    until_sent(db, [known_id], worker)
    why = db.execute("SELECT reason, handled_as FROM pgoutbox.waiting_view WHERE id = %s", [message_id]).fetchone()
    assert why == ("no handler", "mail@2")
    assert "waits: no handler for version 2\n" in run_process("list", dsn=dsn, COLUMNS="300").out
    shown = run_process("show", str(message_id), dsn=dsn, COLUMNS="300").out
    assert "waits\tno handler for version 2\n" in shown
    (listed,) = map(json.loads, run_process("list", "--state", "pending", "--json", dsn=dsn).out.splitlines())
    assert (listed["waits"], listed["handled_as"]) == ("no handler", "mail@2")
    (message, _) = Operator(db).show_message(message_id)
    assert message.why_it_waits == (
        "no running worker of its queue has a handler for mail@2, its topic with the version of its payload; "
        "pgoutbox workers lists the topics"
    )
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 hour' WHERE id = %s", [message_id])
    examined = run_process("doctor", dsn=dsn, COLUMNS="300")
    assert "no handler for mail@2 in a worker of this queue" in examined.out
    assert worker.stop() == 0
    drained = start_worker(OLD, "--drain")
    assert drained.wait() == 0  # It does not wait for it.
    assert rows_of(db, message_id)[0].attempt_count == 0
    drained = start_worker(NEW, "--drain")
    assert drained.wait() == 0
    assert rows_of(db, message_id)[0].state == "sent"


@pytest.mark.parametrize("concurrency", ["1", "10"])
@pytest.mark.parametrize("keys", [("k", None), (None, "k")], ids=["coalesce key", "ordering key"])
def test_an_idle_worker_that_knows_the_version_of_the_next_message_of_a_key_is_told(
    db: psycopg.Connection,
    start_worker: StartWorker,
    gate: Path,
    keys: tuple[str | None, str | None],
    concurrency: str,
) -> None:
    """The other worker ends the message before it, and cannot claim the next one."""
    quiet: dict[str, Any] = {"poll_interval_seconds": "3600", "lease_seconds": "3600"}
    old = start_worker(OLD, environment={"GATE": str(gate)}, concurrency=concurrency, **quiet)
    first = enqueue_old(db, *keys)
    until_begun(db, first, old)  # A newer message supersedes one whose handler has not begun.
    second = enqueue_new(db, *keys)
    new = start_worker(NEW, **quiet)
    wait_until(lambda: is_asleep(db, new), lambda: new.log)
    gate.touch()
    until_sent(db, [first, second], new)
    assert db.execute("SELECT by FROM handed WHERE id = %s", [second]).fetchone() == ("new",)


def test_an_idle_worker_is_told_of_a_message_of_its_version_beside_a_full_worker_without_it(
    db: psycopg.Connection, start_worker: StartWorker, gate: Path
) -> None:
    quiet: dict[str, Any] = {"poll_interval_seconds": "3600", "lease_seconds": "3600"}
    old = start_worker(OLD, environment={"GATE": str(gate)}, concurrency="1", **quiet)
    held = enqueue_old(db)
    wait_until(lambda: rows_of(db, held)[0].state == "sending", lambda: old.log)
    new = start_worker(NEW, **quiet)
    wait_until(lambda: is_asleep(db, new), lambda: new.log)
    until_sent(db, [enqueue_new(db)], new)
    assert rows_of(db, held)[0].state == "sending"


def test_a_drain_does_not_wait_for_a_message_behind_one_of_an_unknown_version(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    unknown, behind = enqueue_new(db, ordering_key="k"), enqueue_old(db, ordering_key="k")
    drained = start_worker(OLD, "--drain")
    assert drained.wait() == 0, drained.log
    assert {(row.state, row.attempt_count) for row in rows_of(db, unknown, behind)} == {("pending", 0)}


@pytest.mark.parametrize("ordering_key", [None, "k"])
def test_the_probe_of_a_breaker_passes_over_an_unknown_version(
    db: psycopg.Connection, start_worker: StartWorker, gate: Path, ordering_key: str | None
) -> None:
    def put(payload_version: int) -> int:
        key = None if ordering_key is None else f"{ordering_key}{payload_version}"
        payload, destination = {"name": "Ada Byron"}, "tel:1"
        return enqueue(db, "mail", payload, payload_version=payload_version, ordering_key=key, destination=destination)

    known = put(1)
    settings = {"breaker_cooldown_seconds": "0.1", "breaker_max_cooldown_seconds": "0.1"}
    worker = start_worker(SENDS, environment={"GATE": str(gate)}, **settings)
    wait_until(lambda: worker.records("breaker_opened"), lambda: worker.log)
    unknown = put(2)
    due_earlier(db, unknown, 3600)
    probed = len(worker.records("breaker_reopened"))
    wait_until(lambda: len(worker.records("breaker_reopened")) > probed + 1, lambda: worker.log)
    gate.touch()
    until_sent(db, [known], worker)
    (row,) = rows_of(db, unknown)
    assert (row.state, row.attempt_count) == ("pending", 0)


def test_a_newer_version_supersedes_an_older_one_of_its_key(db: psycopg.Connection, start_worker: StartWorker) -> None:
    older, newer = enqueue_old(db, coalesce_key="k"), enqueue_new(db, coalesce_key="k")
    worker = start_worker(NEW, "--drain")
    assert worker.wait() == 0, worker.log
    assert [row.state for row in rows_of(db, older, newer)] == ["skipped", "sent"]


def test_an_attempt_at_a_version_is_taken_over_by_a_worker_that_knows_it(
    db: psycopg.Connection, start_worker: StartWorker, gate: Path
) -> None:
    killed = start_worker(NEW, environment={"GATE": str(gate)}, lease_seconds="1")
    message_id = enqueue_new(db)
    wait_until(lambda: rows_of(db, message_id)[0].state == "sending", lambda: killed.log)
    killed.kill()
    old = start_worker(OLD, lease_seconds="1")
    lapsed = "SELECT lease_expires_at < now() - interval '3 s' FROM pgoutbox.message_view WHERE id = %s"
    wait_until(lambda: db.execute(lapsed, [message_id]).fetchone() == (True,), lambda: old.log)
    assert rows_of(db, message_id)[0].state == "sending"
    until_sent(db, [message_id], start_worker(NEW, lease_seconds="1"))


def test_every_way_to_enqueue_writes_the_version_of_the_topic(dsn: str, db: psycopg.Connection) -> None:
    topic = Topic("mail", payload=Person, version=3, upgrade={2: dict})
    producer = Outbox(settings_for(dsn)).on(db)
    ada = Person(first="Ada", last="Byron")
    with db.transaction():
        one = producer.enqueue(topic, ada, owner="ada")
        many = producer.enqueue_many([NewMessage(topic, ada), NewMessage("mail", {})])
        fan = producer.enqueue_fanout(topic, ada, destinations=["mailto:a@example.org"])
    versions = "SELECT payload_version FROM pgoutbox.message_view ORDER BY id"
    assert [version for (version,) in db.execute(versions)] == [3, 3, 1, 3]
    assert one is not None
    assert (len(many), len(fan)) == (2, 1)
    db.execute("UPDATE pgoutbox.message SET payload_version = 2 WHERE id = %s", [one.id])
    outbox = Outbox(settings_for(dsn))
    outbox.define(topic)
    with db.transaction():
        assert outbox.on(db).edit(one.id, owner="ada", available_at=None, delay=timedelta(1)) is EditResult.EDITED
    read = "SELECT payload_version FROM pgoutbox.message WHERE id = %s"
    assert db.execute(read, [one.id]).fetchone() == (2,)
    with db.transaction():
        assert outbox.on(db).edit(one.id, owner="ada", payload=ada) is EditResult.EDITED
    assert db.execute(read, [one.id]).fetchone() == (3,)


class Greeting(BaseModel):
    name: str


def topic_of(model: type[BaseModel], version: int = 1) -> Topic[Any]:
    return Topic("mail", payload=model, dedupe_key=lambda _: "k", version=version)


def enqueue_one(db: psycopg.Connection, outbox: Outbox, topic: Topic[Any], payload: BaseModel) -> int:
    return outbox.on(db).enqueue(topic, payload).id


def enqueue_in_bulk(db: psycopg.Connection, outbox: Outbox, topic: Topic[Any], payload: BaseModel) -> int:
    return outbox.on(db).enqueue_many([NewMessage("other", 1), NewMessage(topic, payload)]).ids[1]


def enqueue_by_sql(db: psycopg.Connection, _: Outbox, topic: Topic[Any], payload: BaseModel) -> int:
    return enqueue(db, "mail", payload.model_dump(), dedupe_key="k", payload_version=topic.version)


def enqueue_by_sql_in_bulk(db: psycopg.Connection, _: Outbox, topic: Topic[Any], payload: BaseModel) -> int:
    item = {"topic": "mail", "payload": payload.model_dump(), "dedupe_key": "k", "payload_version": topic.version}
    ((message_id,),) = db.execute("SELECT id FROM pgoutbox.enqueue_many(%s)", [Jsonb([item])]).fetchall()
    return int(message_id)


WAYS: Final[Sequence[Way]] = (enqueue_one, enqueue_in_bulk, enqueue_by_sql, enqueue_by_sql_in_bulk)
ADA: Final = Greeting(name="Ada Byron")


CONFLICT: Final = (DedupeConflictError, psycopg.errors.UniqueViolation)


@pytest.mark.parametrize("way", WAYS)
def test_a_repetition_with_another_version_of_the_payload_is_a_duplicate(
    dsn: str, db: psycopg.Connection, way: Way
) -> None:
    """Otherwise a deployment would fail each transaction that repeats an enqueue of the former release, and back."""
    outbox = Outbox(settings_for(dsn))
    old, new = topic_of(Greeting), topic_of(Person, version=2)
    with db.transaction():
        message_id = way(db, outbox, old, ADA)
    for again in WAYS:
        for topic, payload in ((new, Person(first="Ada", last="Byron")), (old, ADA)):
            with db.transaction():
                assert again(db, outbox, topic, payload) == message_id
        with pytest.raises(CONFLICT), db.transaction():
            again(db, outbox, old, Greeting(name="Bob"))


@pytest.mark.parametrize("way", WAYS)
def test_a_message_that_takes_a_dedupe_key_is_compared_with_its_own_version(
    dsn: str, db: psycopg.Connection, way: Way
) -> None:
    outbox = Outbox(settings_for(dsn))
    old, new = topic_of(Greeting), topic_of(Person, version=2)
    with db.transaction():
        cancelled = way(db, outbox, old, ADA)
        outbox.on(db).cancel(cancelled)
    with db.transaction():
        message_id = way(db, outbox, new, Person(first="Ada", last="Byron"))
    assert message_id != cancelled
    with db.transaction():
        assert way(db, outbox, old, Greeting(name="Bob")) == message_id
    with pytest.raises(CONFLICT), db.transaction():
        way(db, outbox, new, Person(first="Bob", last="Byron"))


def test_a_message_that_gets_its_dedupe_key_back_is_compared_with_its_own_version(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))
    new = topic_of(Person, version=2)
    with db.transaction():
        message_id = enqueue_one(db, outbox, new, Person(first="Ada", last="Byron"))
        outbox.on(db).cancel(message_id)
    db.execute("DELETE FROM pgoutbox.dedupe")  # As after a prune of a message that had taken the key.
    assert run_process("redrive", str(message_id), dsn=dsn).exit_code == 0
    with db.transaction():
        assert enqueue_one(db, outbox, topic_of(Greeting), ADA) == message_id
    with pytest.raises(DedupeConflictError), db.transaction():
        enqueue_one(db, outbox, new, Person(first="Bob", last="Byron"))


def test_a_repetition_with_a_new_field_is_a_duplicate_by_a_rule_or_by_a_version(
    dsn: str, db: psycopg.Connection
) -> None:
    class WithLanguage(Greeting):
        language: str = "en"

    outbox = Outbox(settings_for(dsn))
    with db.transaction():
        message_id = enqueue_one(db, outbox, topic_of(Greeting), ADA)
    repeated = WithLanguage(name="Ada Byron")
    with pytest.raises(DedupeConflictError), db.transaction():
        enqueue_one(db, outbox, topic_of(WithLanguage), repeated)
    ignoring = Topic("mail", payload=WithLanguage, dedupe_key=lambda _: "k", on_duplicate="ignore")
    for topic in (ignoring, topic_of(WithLanguage, version=2)):
        with db.transaction():
            assert enqueue_one(db, outbox, topic, repeated) == message_id


def test_a_copy_keeps_its_version(dsn: str, db: psycopg.Connection, start_worker: StartWorker) -> None:
    message_id = enqueue_new(db)
    assert start_worker(NEW, "--drain").wait() == 0
    assert run_process("resend", str(message_id), "--yes", dsn=dsn).exit_code == 0
    copied = "SELECT payload_version FROM pgoutbox.message WHERE resend_of = %s"
    assert db.execute(copied, [message_id]).fetchone() == (2,)


def version_of(db: psycopg.Connection, message_id: int) -> tuple[object, int]:
    ((payload, version),) = db.execute(
        "SELECT payload, payload_version FROM pgoutbox.message WHERE id = %s", [message_id]
    ).fetchall()
    return payload, version


@pytest.fixture
def app(tmp_path: Path) -> dict[str, str]:
    """The environment of a command that knows version 2."""
    (tmp_path / "versions_app.py").write_text(textwrap.dedent(NEW))
    return {"PYTHONPATH": str(tmp_path), "PGOUTBOX_APP": "versions_app:outbox"}


def correct(dsn: str, message_id: int, payload: object, *further: str, **environment: str) -> Done:
    change = f"payload={json.dumps(payload)}"
    return run_process("correct", str(message_id), "--set", change, *further, dsn=dsn, stdin=b"", **environment)


def test_a_corrected_member_of_the_new_version_reaches_the_handler_and_the_copies(
    dsn: str, db: psycopg.Connection, start_worker: StartWorker, app: dict[str, str]
) -> None:
    """Left in its former version, the payload would lose the correction in the upgrade."""
    message_id = enqueue_old(db)
    corrected = correct(dsn, message_id, {"last": "Lovelace"}, **app)
    assert corrected.exit_code == 0, corrected.err
    assert version_of(db, message_id) == ({"first": "Ada", "last": "Lovelace"}, 2)
    assert start_worker(NEW, "--drain").wait() == 0
    assert run_process("resend", str(message_id), dsn=dsn).exit_code == 0
    assert start_worker(NEW, "--drain").wait() == 0
    handed = db.execute("SELECT DISTINCT by, payload FROM handed").fetchall()
    assert handed == [("new", '{"first":"Ada","last":"Lovelace"}')]
    assert len(db.execute("SELECT FROM handed").fetchall()) == 2


def test_the_model_checks_a_payload_that_was_brought_forward(
    dsn: str, db: psycopg.Connection, app: dict[str, str]
) -> None:
    message_id = enqueue_old(db)
    refused = correct(dsn, message_id, {"last": 7}, **app)
    assert refused.exit_code != 0
    assert "payload.last" in refused.err
    assert version_of(db, message_id) == ({"name": "Ada Byron"}, 1)


def test_a_correction_without_the_application_is_refused_while_workers_know_a_later_version(
    dsn: str, db: psycopg.Connection, start_worker: StartWorker, app: dict[str, str]
) -> None:
    """A person who names the version may correct it as it is."""
    message_id = enqueue_old(db)
    due_earlier(db, message_id, -86_400)
    assert correct(dsn, message_id, {"name": "Ada King"}).exit_code == 0
    worker = start_worker(NEW)
    wait_until(lambda: "worker_started" in worker.events(), lambda: worker.log)
    refused = correct(dsn, message_id, {"last": "Lovelace"}, COLUMNS="300")
    assert refused.exit_code != 0
    assert (
        f"payload: message {message_id} has version 1 of the payload, and workers know version 2; give --app with that "
        "version, or payload_version 1 to change members of version 1" in refused.err
    )
    assert version_of(db, message_id) == ({"name": "Ada King"}, 1)
    for environment in ({}, app):
        named = correct(dsn, message_id, {"name": "Ada Lovelace"}, "--set", "payload_version=1", **environment)
        assert named.exit_code == 0, named.err
        assert version_of(db, message_id) == ({"name": "Ada Lovelace"}, 1)
    assert correct(dsn, message_id, {"last": "Noel"}, **app).exit_code == 0
    assert version_of(db, message_id) == ({"first": "Ada", "last": "Noel"}, 2)


@pytest.mark.parametrize(
    ("correction", "problem"),
    [
        (
            {"payload": 1, "payload_version": 1},
            "payload_version: message 1 has version 2 of the payload, which is later",
        ),
        ({"payload": 1, "payload_version": 0}, "payload_version: must be a whole number from 1 to 100, not 0"),
        ({"payload": 1, "payload_version": None}, "payload_version: must be a whole number from 1 to 100, not None"),
        ({"payload_version": 2}, "payload_version: must not be given without payload"),
    ],
)
def test_an_impossible_version_of_a_correction_is_refused(
    db: psycopg.Connection, correction: Correction, problem: str
) -> None:
    assert enqueue_new(db) == 1
    with pytest.raises(ArgumentError, match=problem):
        Operator(db).correct(1, correction)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="payload_version: must be from 1 to 100"):
        db.execute("""SELECT pgoutbox.correct('{1}', '{"payload": 1, "payload_version": "x"}')""")


def test_an_owner_finds_payloads_in_the_version_of_the_topic(dsn: str, db: psycopg.Connection) -> None:
    def split(payload: dict[str, str]) -> dict[str, str]:
        first, _, last = payload["name"].partition(" ")
        return {"first": first, "last": last}

    for version, payload in enumerate(
        [{"name": "Ada Byron"}, split({"name": "Ada King"}), {"full": "Ada Byron"}], start=1
    ):
        enqueue(db, "mail", payload, owner="ada", payload_version=version)
    enqueue(db, "other", "note", owner="ada", payload_version=2)
    outbox = Outbox(settings_for(dsn))
    outbox.define(Topic("mail", payload=Person, version=2, upgrade={1: split}))
    found = outbox.on(db).find(owner="ada", payloads=True)
    assert [(message.payload, message.payload_version) for message in found] == [
        ("note", 2),
        ({"full": "Ada Byron"}, 3),
        ({"first": "Ada", "last": "King"}, 2),
        ({"first": "Ada", "last": "Byron"}, 2),
    ]
    assert {message.payload_version for message in outbox.on(db).find(owner="ada")} == {None}
    failing = Outbox(settings_for(dsn))
    failing.define(Topic("mail", version=2, upgrade={1: lambda payload: payload["nam"]}))
    with pytest.raises(StateError, match=r"^message 1: the payload cannot be upgraded from version 1: KeyError: 'nam'"):
        failing.on(db).find(owner="ada", payloads=True)


@pytest.mark.parametrize(
    ("upgrade", "reason"),
    [
        ({}, "the payload has version 1, and the topic no upgrade of it"),
        ({1: lambda payload: payload["nam"]}, "the payload cannot be upgraded from version 1: KeyError: 'nam'"),
        ({1: lambda payload: payload}, "the payload does not fit the topic's model: payload.first: Field required"),
    ],
)
def test_a_payload_that_cannot_be_upgraded_waits_as_unreadable_and_fails_in_the_end(
    dsn: str, db: psycopg.Connection, upgrade: dict[int, Any], reason: str
) -> None:
    outbox = Outbox(settings_for(dsn))
    topic = Topic("mail", payload=Person, version=2, upgrade=upgrade, unreadable_timeout=0)

    @outbox.handler(topic)
    async def mail(message: object, ctx: object) -> None:
        raise AssertionError("it has no payload")

    message_id = enqueue_old(db)
    asyncio.run(Worker(outbox).run_once())
    (row,) = rows_of(db, message_id)
    assert row.last_error is not None
    assert reason in row.last_error
    assert (row.state, row.attempt_count) == (State.FAILED, 1)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_payload_without_a_model_is_upgraded(dsn: str, db: psycopg.Connection, *, is_async: bool) -> None:
    outbox = Outbox(settings_for(dsn))
    seen: list[object] = []

    async def deliver(message: Message[object], ctx: object) -> None:
        seen.append(message.payload)

    def deliver_in_a_thread(message: Message[object], ctx: object) -> None:
        seen.append(message.payload)

    topic = Topic("mail", version=3, upgrade={1: lambda payload: [payload], 2: lambda payload: {"all": payload}})
    outbox.handler(topic)(deliver if is_async else deliver_in_a_thread)
    enqueue(db, "mail", "old")
    enqueue(db, "mail", "newer", payload_version=2)
    enqueue(db, "mail", "newest", payload_version=3)
    asyncio.run(Worker(outbox).run_once())
    assert sorted(map(str, seen)) == ["newest", "{'all': 'newer'}", "{'all': ['old']}"]


def test_an_upgrade_that_changes_its_argument_runs_once_for_each_call(dsn: str, db: psycopg.Connection) -> None:
    """A batch with a permanent failure is tried again by halves."""
    outbox = Outbox(settings_for(dsn))
    seen: list[object] = []

    def to_cents(payload: dict[str, int]) -> dict[str, int]:
        payload["amount"] *= 100
        return payload

    @outbox.batch_handler(Topic("mail", version=2, upgrade={1: to_cents}), max_size=4)
    async def deliver(messages: Sequence[Message[dict[str, int]]], contexts: object) -> None:
        if any(message.payload["amount"] == 0 for message in messages):
            raise Permanent("nothing to pay")
        seen.extend(message.payload["amount"] for message in messages)

    for amount in (1, 2, 3, 0):
        enqueue(db, "mail", {"amount": amount})
    asyncio.run(Worker(outbox).run_once())
    assert sorted(seen, key=str) == [100, 200, 300]


def test_a_former_name_leads_to_the_definition_of_its_topic(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    outbox.define(Topic("mail.welcome", aliases=("mail.greeting",), queue="critical", version=2, redact=("iban",)))
    with db.transaction():
        outbox.on(db).enqueue("mail.greeting", {"iban": "DE"})
    found = db.execute("SELECT topic, queue, payload_version FROM pgoutbox.message").fetchall()
    assert found == [("mail.welcome", "critical", 2)]
    assert outbox.topics["mail.greeting"].redact == ("iban",)


def test_the_doctor_names_a_version_that_the_application_does_not_know(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "versions_app.py").write_text(textwrap.dedent(OLD))
    enqueue_new(db)
    examined = run_process("doctor", "--app", "versions_app:outbox", dsn=dsn, PYTHONPATH=str(tmp_path), COLUMNS="300")
    assert "topic mail: messages with version 2 of the payload wait, and its handler knows version 1" in examined.out


def test_a_former_name_of_a_topic_has_its_handler_its_queue_and_its_hook(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    topic = Topic("mail.welcome", queue="critical", aliases=("mail.greeting",))
    seen: list[tuple[str, object]] = []

    @outbox.handler(topic)
    async def welcome(message: Message[object], ctx: object) -> None:
        seen.append((message.topic, message.payload))
        if message.payload == "bad":
            raise Permanent("bad")

    @outbox.on_failed(topic)
    async def failed(message: Message[Failure], ctx: object) -> None:
        seen.append((message.topic, message.payload.payload))

    for name in ("mail.greeting", "mail.welcome"):
        for payload in ("good", "bad"):
            enqueue(db, name, payload, queue="critical")
    asyncio.run(Worker(outbox, queues=["critical"]).run_once())
    assert sorted(seen, key=str) == [
        ("mail.greeting", "bad"),
        ("mail.greeting", "good"),
        ("mail.greeting.failed", "bad"),
        ("mail.welcome", "bad"),
        ("mail.welcome", "good"),
        ("mail.welcome.failed", "bad"),
    ]


def test_a_pause_warns_about_the_other_names_of_a_topic(dsn: str, db: psycopg.Connection, tmp_path: Path) -> None:
    (tmp_path / "renamed_app.py").write_text(
        "from pgoutbox import Outbox, Topic\n"
        "outbox = Outbox()\n"
        "outbox.define(Topic('mail.welcome', aliases=('mail.greeting', 'mail.hello')))\n"
    )

    def pause(topic: str, app: str = "renamed_app:outbox") -> Done:
        arguments = ("pause", "--topic", topic, "--yes", "--app", app)
        return run_process(*arguments, dsn=dsn, PYTHONPATH=str(tmp_path), COLUMNS="300")

    text = "messages with other names of topic {} are not paused: {}; pause each name"
    assert text.format("mail.welcome", "mail.greeting, mail.hello") in pause("mail.welcome").err
    assert text.format("mail.hello", "mail.greeting") in pause("mail.hello").err
    for topic in ("mail.greeting", "mail.other"):
        done = pause(topic)
        assert (done.exit_code, "other names" in done.err) == (0, False)
    listed = run_process("topics", "--app", "renamed_app:outbox", "--json", PYTHONPATH=str(tmp_path)).lines
    present_names = {line["topic"]: line["present_name"] for line in listed}
    assert present_names == {"mail.greeting": "mail.welcome", "mail.hello": "mail.welcome", "mail.welcome": None}
    # The pause matters more than the warning.
    done = pause("mail.late", app="no_such_app:outbox")
    assert (done.exit_code, "other names of topic mail.late are unknown: " in done.err) == (0, True)
    paused = [topic for (topic,) in db.execute("SELECT topic FROM pgoutbox.topic_pause_view ORDER BY topic")]
    assert paused == ["mail.greeting", "mail.hello", "mail.late", "mail.other", "mail.welcome"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"version": 0}, "version: must be a whole number from 1 to 100, not 0"),
        ({"version": True}, "version: must be a whole number from 1 to 100, not True"),
        (
            {"version": 2, "upgrade": {2: dict}},
            r"upgrade\[2\]: must be for an earlier version than the topic's, which is 2",
        ),
        ({"version": 2, "upgrade": {1: "x"}}, r"upgrade\[1\]: must be a function of the payload"),
        ({"version": 4, "upgrade": {1: dict, 3: dict}}, "upgrade: has no function for version 2"),
        ({"aliases": ("Mail",)}, r"aliases\[0\]: must be 1 to 63 of a-z"),
    ],
)
def test_a_mistake_in_versions_or_names_is_refused_at_the_definition(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^topic 'mail': {problem}"):
        Topic("mail", **options)


def test_a_former_name_with_a_handler_of_its_own_is_refused() -> None:
    outbox = Outbox()
    outbox.handler("mail.greeting")(lambda message, ctx: None)
    with pytest.raises(ConfigurationError, match=r"topic 'mail\.greeting' has a handler already"):
        outbox.handler(Topic("mail.welcome", aliases=("mail.greeting",)))(lambda message, ctx: None)


@pytest.mark.parametrize("version", [0, 101])
def test_an_impossible_version_is_refused_by_sql(db: psycopg.Connection, version: int) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="payload_version: must be from 1 to 100"):
        enqueue(db, "mail", 1, payload_version=version)


def test_no_message_takes_the_version_from_its_producer() -> None:
    with pytest.raises(TypeError, match="payload_version"):
        NewMessage("mail", 1, payload_version=2)  # type: ignore[call-arg]


def test_the_option_of_a_call_is_refused(db: psycopg.Connection, dsn: str) -> None:
    with pytest.raises((TypeError, ArgumentError)):
        Outbox(settings_for(dsn)).on(db).enqueue("mail", 1, payload_version=2)  # type: ignore[call-overload]
