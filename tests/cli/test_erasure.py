"""Tests the commands `erase`, `export` and `mentions` as a person sees them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pgoutbox.message import State
from tests.support.command_line import Done
from tests.support.messages import put
from tests.support.outbox_actions import rows_of
from tests.support.roles import login

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

    from tests.conftest import Connect

ADA = "mailto:ada@example.org"


@pytest.fixture
def database(connect: Connect) -> psycopg.Connection:
    """Open an autocommit connection to the database of `cli`."""
    return connect(autocommit=True)


def test_erase_asks_first_and_shows_the_effect(cli: Callable[..., Done], database: psycopg.Connection) -> None:
    put(database, State.FAILED, destination=ADA)
    put(database, State.SENT, destination=ADA)
    chosen = ("--destination", "ada@example.org")
    assert cli("erase", *chosen, "--dry-run") == Done(0, "would erase 2 messages: 1 failed, 1 sent\n", "")
    assert cli("erase", *chosen, "--dry-run", "--json").json == {"would": "erase", "failed": 1, "sent": 1}
    refused = cli("erase", *chosen)
    assert refused == Done(2, "", "error: this would erase 2 messages and all their traces; pass --yes to do it\n")
    assert len(rows_of(database)) == 2
    assert cli("erase", *chosen, "--yes") == Done(0, "erased 2 messages\n", "")
    assert rows_of(database) == []


def test_erase_names_each_message_that_is_left(cli: Callable[..., Done], database: psycopg.Connection) -> None:
    sending, pending = put(database, State.SENDING), put(database)
    assert cli("erase", sending, pending, 999_999, "--yes") == Done(
        1,
        "erased 1 message\n",
        f"error: message {sending} is in flight and was asked to stop; erase it again after its attempt\n"
        "error: message 999999 does not exist\n",
    )


def test_erase_lists_the_rows_that_still_mention_the_address(
    cli: Callable[..., Done], database: psycopg.Connection
) -> None:
    put(database, destination=ADA)
    other = put(database, destination="mailto:bob@example.org")
    database.execute("UPDATE pgoutbox.message SET last_error = 'cc ada@example.org' WHERE id = %s", [other])
    done = cli("erase", "--destination", ADA, "--yes")
    assert (done.exit_code, done.out.splitlines()[0]) == (0, "erased 1 message")
    assert done.out.splitlines()[-1].split() == ["message", "last_error", str(other)]
    assert done.err == "these rows still mention them; decide about each:\n"
    mention = {"table": "message", "column": "last_error", "id": other}
    assert cli("erase", "--destination", ADA, "--yes", "--json").json == {
        "erased": [], "in_flight": [], "locked": [], "changed": [], "missing": [], "mentions": [mention],
    }  # fmt: skip
    assert cli("mentions", ADA, "--json").json == mention
    assert cli("mentions", "nobody").exit_code == 0


def test_ids_come_from_a_file(cli: Callable[..., Done], database: psycopg.Connection, tmp_path: Path) -> None:
    message_id = put(database)
    (tmp_path / "ids").write_text(f"{message_id}\n")
    assert cli("erase", "--file", tmp_path / "ids", "--yes").out == "erased 1 message\n"


@pytest.mark.parametrize("command", ["erase", "export"])
def test_exactly_one_way_of_selecting_is_necessary(cli: Callable[..., Done], command: str) -> None:
    for chosen in ((), (1, "--owner", "ada"), ("--owner", "ada", "--destination", ADA)):
        done = cli(command, *chosen)
        assert done.exit_code == 2
        assert "give message ids, --file, --owner or --destination, and only one of them" in " ".join(done.err.split())


def test_export_prints_a_document_for_each_message(cli: Callable[..., Done], database: psycopg.Connection) -> None:
    ids = [put(database, state, destination=ADA) for state in (State.FAILED, State.PENDING)]
    done = cli("export", "--destination", ADA)
    assert [(one["id"], one["payload"]) for one in map(json.loads, done.out.splitlines())] == [
        (message_id, {"to": "ada"}) for message_id in ids
    ]
    assert (done.exit_code, done.err) == (0, "exported 2 messages\n")


def test_an_operator_erases_and_does_not_read(
    cli: Callable[..., Done], database: psycopg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(database, destination=ADA)
    with login(dsn, "pgoutbox_operator") as their_dsn:
        monkeypatch.setenv("PGOUTBOX_DSN", their_dsn)
        for command in (("export", "--destination", ADA), ("mentions", ADA)):
            done = cli(*command)
            assert (done.exit_code, done.out) == (1, "")
            assert "ask the owner to grant the right" in done.err
        done = cli("erase", "--destination", ADA, "--yes")
    assert done == Done(
        0,
        "erased 1 message\n",
        "other rows may mention the owner or the address; as the owner of the schema, run: pgoutbox mentions\n",
    )
