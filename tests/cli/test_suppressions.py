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
    added = ("suppression", "add", "Ada@example.org", "--reason", "bounce")
    assert [cli(*added).out for _ in range(2)] == ["suppressed\n", "was suppressed already\n"]
    assert cli("suppression", "add", "otto@example.org", "--list", "news", "--json").json == {"changed": True}
    header, *rows = (line.split("\t") for line in cli("suppression", "list").out.splitlines())
    assert header == ["digest", "mailing_list", "reason", "created_at"]
    assert [row[1:3] for row in rows] == [["news", "manual"], ["", "bounce"]]
    of_ada = cli("suppression", "list", "--address", "ada@EXAMPLE.org", "--json").json
    assert (of_ada["reason"], of_ada["mailing_list"]) == ("bounce", None)
    assert cli("suppression", "remove", "ada@example.org").out == "no longer suppressed\n"
    missing = cli("suppression", "remove", "ada@example.org")
    assert (missing.exit_code, missing.out) == (1, "was not suppressed; `pgoutbox suppression list` shows all\n")


def test_a_file_is_imported_and_an_export_of_it_again(
    cli: Callable[..., Done], connect: Connect, tmp_path: Path
) -> None:
    bounced = tmp_path / "bounced.csv"
    bounced.write_bytes("\ufeffaddress,mailing_list\nada@example.org,\nOtto@b\u00fccher.example,\n".encode())
    done = cli("suppression", "import", str(bounced), "--reason", "bounce", "--list", "news")
    assert (done.exit_code, done.out) == (0, "2 suppressions added\n")
    exported = cli("suppression", "export").out
    assert exported.startswith("digest,mailing_list,reason,created_at\n")
    assert exported.count(",,bounce,") == 2  # An empty field means every list.
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
        ("digest\n12\n", "items[0].digest: must be 40 hexadecimal digits"),
        ("mailing_list\nnews\n", "items[0].address: must not be null"),
        ("address\nada@example.org,news\n", "items[0] has more fields than the first line"),
        ("address,reason\nada@example.org,bounce\u2028\n", "items[0].reason: must be bounce, complaint"),
        ("address,reason\nada@example.org,\n", "error: items[0].reason: must not be null"),
        ('address\nada@example.org\n"' + "otto@example.org\n" * 10_000, "after line 2: field larger than field limit"),
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
