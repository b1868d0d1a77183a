"""Tests the commands for suppressed addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.command_line import Done

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Connect


def test_an_address_is_added_listed_and_removed(cli: Callable[..., Done]) -> None:
    assert cli("suppression", "list").out == "no suppressed addresses\n"
    added = ("suppression", "add", "Ada@example.org", "--reason", "bounce", "--detail", "5.1.1")
    assert [cli(*added).out for _ in range(2)] == ["suppressed\n", "was suppressed already\n"]
    assert cli("suppression", "add", "otto@example.org", "--list", "news", "--json").json == {"changed": True}
    header, *rows = (line.split("\t") for line in cli("suppression", "list").out.splitlines())
    assert header == ["digest", "mailing_list", "reason", "detail", "created_at"]
    assert [row[1:4] for row in rows] == [["news", "manual", ""], ["", "bounce", "5.1.1"]]
    of_ada = cli("suppression", "list", "--address", "ada@EXAMPLE.org", "--json").json
    assert (of_ada["reason"], of_ada["mailing_list"]) == ("bounce", None)
    assert cli("suppression", "remove", "ada@example.org").out == "no longer suppressed\n"
    missing = cli("suppression", "remove", "ada@example.org")
    assert (missing.exit_code, missing.err) == (
        1, "error: there is no such suppression; `pgoutbox suppression list --address ADDRESS` shows all\n"
    )  # fmt: skip


def test_a_file_is_imported_and_an_export_of_it_again(
    cli: Callable[..., Done], connect: Connect, tmp_path: Path
) -> None:
    bounced = tmp_path / "bounced.csv"
    bounced.write_bytes("\ufeffaddress,detail\nada@example.org,5.1.1\nOtto@b\u00fccher.example,\n".encode())
    done = cli("suppression", "import", str(bounced), "--reason", "bounce")
    assert (done.exit_code, done.out) == (0, "2 suppressions added\n")
    exported = cli("suppression", "export").out
    assert exported.startswith("digest,mailing_list,reason,detail,created_at\n")
    assert "ada" not in exported
    database = connect(autocommit=True)
    database.execute("DELETE FROM pgoutbox.suppression")
    copy = tmp_path / "copy.csv"
    copy.write_text(exported)
    assert cli("suppression", "import", str(copy), "--json").json == {"added": 2}
    assert cli("suppression", "export").out == exported


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("email\nada@example.org\n", "unknown column 'email'"),
        ("address\nada@example.org\nada\n", "items[1].address: must be one e-mail address"),
        ("digest\n12\n", "items[0].digest: must be 32 hexadecimal digits"),
        ("mailing_list\nnews\n", "items[0].address: must not be null"),
        ("address,created_at\nada@example.org,yesterday morning\n", "invalid input syntax"),
    ],
)
def test_a_wrong_file_is_refused(
    cli: Callable[..., Done], connect: Connect, tmp_path: Path, text: str, error: str
) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text(text)
    done = cli("suppression", "import", str(file))
    assert done.exit_code != 0
    assert error in done.err
    assert connect().execute("SELECT count(*) FROM pgoutbox.suppression").fetchone() == (0,)
