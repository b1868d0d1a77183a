"""Tests that an export has all data of a person, and nothing of anybody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from cryptography.fernet import Fernet

from pgoutbox import ConfigurationError, Outbox, Topic
from pgoutbox.encryption import is_sealed
from pgoutbox.message import State
from pgoutbox.operations import Action, Operator
from tests.support.messages import ADD_ATTEMPT, LARGE, put
from tests.support.outbox_actions import settings_for
from tests.support.settings import settings_with

if TYPE_CHECKING:
    import psycopg
    from pydantic import JsonValue

ADA = "mailto:ada@example.org"
KEY = Fernet.generate_key().decode()


def test_an_export_has_all_data_of_a_message(db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(db.info.dsn))
    with db.transaction():
        message_id = (
            outbox.on(db)
            .enqueue("mail", LARGE, owner="person-7", destination=ADA, headers={"x-to": "ada"}, coalesce_key="k")
            .id
        )
    put(db, destination=ADA)
    db.execute(ADD_ATTEMPT, (message_id, 1))
    Operator(db, actor="olga").cancel(message_id)
    (one,) = Operator(db).export(owner="person-7")
    columns = db.execute("SELECT * FROM pgoutbox.message WHERE false").description
    assert columns is not None
    assert set(one) == {column.name for column in columns} | {"attempts", "acts", "content"}
    assert (one["id"], one["state"], one["owner"], one["destination"]) == (message_id, "cancelled", "person-7", ADA)
    assert (one["payload"], one["headers"], one["coalesce_key"], one["content"]) == (LARGE, {"x-to": "ada"}, "k", None)
    (attempt,) = cast("list[dict[str, JsonValue]]", one["attempts"])
    assert (attempt["attempt_count"], attempt["outcome"], attempt["error"]) == (1, "retry", "busy")
    acts = cast("list[dict[str, JsonValue]]", one["acts"])
    (act,) = (act for act in acts if act["action"] != "export")
    assert (act["actor"], act["action"]) == ("olga", "cancel")


def test_an_export_is_an_act_of_the_audit(db: psycopg.Connection) -> None:
    ids = [put(db, State.SENT, destination=ADA) for _ in range(3)]
    exported = list(Operator(db, actor="olga").export(destination="ada@example.org", batch_size=2))
    assert [one["id"] for one in exported] == ids
    acts = Operator(db).list_acts(action=Action.EXPORT)
    assert [(act.actor, act.first_ids, act.stated) for act in acts] == [
        ("olga", ids[2:], {"by": "destination"}),
        ("olga", ids[:2], {"by": "destination"}),
    ]


def test_the_content_of_a_fan_out_is_exported(db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(db.info.dsn))
    with db.transaction():
        outbox.on(db).enqueue("mail", None, owner="person-8", fair_key="acme")
        outbox.on(db).enqueue_fanout("news", None, [ADA, "mailto:bob@example.org"], content={"html": "<p>"})
    (one,) = Operator(db).export(destination=ADA)
    assert one["content"] == {"html": "<p>"}
    (one,) = Operator(db).export(owner="person-8")
    assert (one["fair_key"], one["lane"]) == ("acme", 2)


def test_encrypted_payloads_are_opened_with_their_key(db: psycopg.Connection, dsn: str) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=KEY))
    outbox.define(Topic("reset", encrypted=True))
    with db.transaction():
        outbox.on(db).enqueue("reset", {"code": "s3cret"}, owner="person-7")
    for key, is_open in ((KEY, True), (None, False), (Fernet.generate_key().decode(), False)):
        with Operator(settings_with(dsn=dsn, encryption_keys=key)) as operator:
            (one,) = operator.export(owner="person-7")
        assert (one["payload"] == {"code": "s3cret"}) is is_open
        assert is_sealed(one["payload"]) is not is_open


def test_exactly_one_way_of_selecting_is_necessary(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(ConfigurationError, match="ids, owner, destination: give exactly one"):
        list(Operator(rolled_back).export())
