"""Tests the tokens of links to unsubscribe."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import pytest

from pgoutbox.unsubscribe import tokens
from pgoutbox.unsubscribe.tokens import Target, target_of, token_of

KEY: Final = b"a key of the tests"
TARGET: Final = Target("0123456789abcdef0123" * 2, "news", datetime(2026, 12, 1, 3, 28, 37, 123456, tzinfo=UTC))


def test_a_token_brings_its_target_back() -> None:
    for mailing_list in ("a", "news", "a.b_c-d", "n" * 63):
        target = TARGET._replace(mailing_list=mailing_list)
        assert target_of(token_of(target, [KEY]), [b"another key", KEY]) == target
    assert target_of(token_of(TARGET, [KEY]), []) is None


def test_no_part_of_a_token_and_none_with_another_character_is_accepted() -> None:
    token = token_of(TARGET, [KEY])
    parts = [token[:end] for end in range(len(token))] + [token[start:] for start in range(1, len(token))]
    changed = [
        f"{token[:place]}{one}{token[place + 1 :]}"
        for place in range(len(token))
        for one in "0af~.-"
        if one != token[place]
    ]
    longer = [f"{token}{one}" for one in ("0", " ", "\n", "\x00", "~")] + [f"{one}{token}" for one in ("0", " ", "~")]
    assert {target_of(text, [KEY]) for text in (*parts, *changed, *longer, token * 2)} == {None}


@pytest.mark.parametrize("content", ["0" * 54 + "News", "0" * 54, "0" * 55 + "news", "g" * 54 + "news"])
def test_a_signed_token_of_another_form_is_refused(content: str) -> None:
    """A later version may sign one with the same key."""
    assert target_of(f"{content}~{tokens._signature(KEY, content)}", [KEY]) is None
