"""Tests of `pgoutbox correct` and `pgoutbox release`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox.message import State
from tests.support.messages import put
from tests.support.outbox_actions import state_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

    from tests.support.command_line import Done

APP = """
from pgoutbox import Outbox, Topic
from pydantic import BaseModel

class Mail(BaseModel):
    to: str
    copies: int = 1

outbox = Outbox()
outbox.define(Topic("mail", payload=Mail))
"""


def row_of(db: psycopg.Connection, message_id: int) -> tuple[Any, ...]:
    (row,) = db.execute(
        "SELECT state, destination, owner, queue, payload, headers FROM pgoutbox.message WHERE id = %s", [message_id]
    ).fetchall()
    return tuple(row)


def test_fields_are_set_and_removed(cli: Callable[..., Done], db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED, destination="mailto:ada@exmaple.org")
    changes = ("--set", "destination=mailto:ada@example.org", "--set", "owner=user=7", "--set", "queue=bulk")
    assert cli("correct", message_id, *changes).out == f"message {message_id}: corrected, and pending\n"
    assert row_of(db, message_id)[:4] == ("pending", "mailto:ada@example.org", "user=7", "bulk")
    cli("correct", message_id, "--set", "owner=", "--set", "destination=")
    assert row_of(db, message_id)[1:3] == (None, None)


def test_members_of_payload_and_headers_are_merged(cli: Callable[..., Done], db: psycopg.Connection) -> None:
    ids = [put(db, State.FAILED) for _ in range(2)]
    done = cli("correct", *ids, "--set", 'payload={"name": "Ada"}', "--set", 'headers={"a": "b"}', "--json")
    assert [json.loads(line)["result"] for line in done.out.splitlines()] == ["corrected"] * 2
    assert [row_of(db, i)[4:] for i in ids] == [({"to": "ada", "name": "Ada"}, {"a": "b"})] * 2


def test_the_model_of_the_application_checks_the_payload(
    cli: Callable[..., Done], db: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_of_corrections.py").write_text(APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    message_id = put(db, State.FAILED)
    app = ("--app", "shop_of_corrections:outbox")
    done = cli("correct", message_id, *app, "--set", 'payload={"copies": "many"}')
    assert (done.exit_code, "payload.copies: does not fit Mail" in done.err) == (2, True)
    assert row_of(db, message_id)[0] == "failed"
    assert cli("correct", message_id, *app, "--set", 'payload={"copies": 2}').exit_code == 0
    assert row_of(db, message_id)[4] == {"to": "ada", "copies": 2}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("1", "--set", "state=sent"), "--set state: give FIELD=VALUE, with one of destination, owner"),
        (("1", "--set", "owner"), "--set owner: give FIELD=VALUE"),
        (("1", "--set", "owner=a", "--set", "owner=b"), "--set owner: given twice"),
        (("1", "--set", "payload=ada"), "payload: not JSON at line 1"),
        (("1", "--set", "payload="), "payload: not JSON at line 1"),
        (("1", "--set", "destination=ada"), "destination: must be a URI"),
        (("1", "--set", "queue="), "queue: "),
        (("--topic", "mail", "--set", 'payload={"a": 1}'), "give message ids, and no filter"),
        (("1", "--topic", "mail", "--set", 'payload={"a": 1}'), "give message ids, and no filter"),
        (("1", "--all", "--set", "owner=a"), "only one of them"),
        (("--set", "owner=a"), "give message ids, --file, or a filter"),
        (("--topic", "mail", "--state", "sent", "--set", "owner=a"), "only pending and failed"),
        (("1",), "--set"),
    ],
)
def test_wrong_changes_are_named(
    cli: Callable[..., Done], db: psycopg.Connection, arguments: tuple[str, ...], told: str
) -> None:
    message_id = put(db, State.FAILED)
    done = cli("correct", *arguments)
    assert (done.exit_code, told in done.err) == (2, True), done.err
    assert state_of(db, message_id) == "failed"


def test_a_dry_run_corrects_nothing(cli: Callable[..., Done], db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    for change in ("owner=user-7", 'payload={"a": 1}'):
        done = cli("correct", message_id, "--set", change, "--dry-run")
        assert done.out == f"message {message_id}: would be corrected, and pending\n"
    assert row_of(db, message_id) == ("failed", None, None, "default", {"to": "ada"}, None)


def test_a_queue_without_a_worker_is_moved_as_a_whole(cli: Callable[..., Done], db: psycopg.Connection) -> None:
    ids = [put(db, queue="orphaned") for _ in range(3)]
    assert cli("correct", "--queue", "orphaned", "--set", "queue=default", "--yes").out == "3 corrected\n"
    assert [row_of(db, i)[3] for i in ids] == ["default"] * 3


def test_a_message_in_flight_is_taken_from_its_worker(cli: Callable[..., Done], db: psycopg.Connection) -> None:
    in_flight, failed = put(db, State.SENDING), put(db, State.FAILED)
    done = cli("release", in_flight, failed)
    assert done.exit_code == 1
    assert f"message {in_flight}: taken from its worker, and tried again when the lease ends" in done.out
    assert f"message {failed} is failed; only sending messages can be released" in done.err
