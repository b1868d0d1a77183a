"""Between which claims a worker looks for what its unanswered claims began."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pgoutbox.unanswered import UnansweredClaims

NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
AGAIN_SECONDS = 60.0


def after_noon(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def looks(claims: UnansweredClaims, now: float) -> list[tuple[datetime | None, datetime | None]]:
    """Look into every span that is due."""
    spans = claims.due(now)
    for span in spans:
        claims.note_looked(span, now)
    return [(span.after, span.before) for span in spans]


def answered(claims: UnansweredClaims, seconds: float) -> None:
    claims.begin()
    claims.end(after_noon(seconds))


def test_nothing_is_looked_for_while_every_claim_is_answered() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    answered(claims, 1)
    claims.begin()
    claims.end()
    assert looks(claims, 2) == []


def test_an_unanswered_claim_is_looked_for_behind_the_last_answered_one_and_again_before_the_next() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    answered(claims, 1)
    claims.begin()
    assert looks(claims, 2) == [(after_noon(1), None)]
    claims.begin()
    claims.end()  # It began nothing, so it says nothing of when.
    answered(claims, 3)
    answered(claims, 4)
    assert looks(claims, 61) == []
    assert looks(claims, 62) == [(after_noon(1), after_noon(3))]
    assert looks(claims, 200) == []


def test_a_first_claim_that_is_unanswered_is_looked_for_everywhere() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    claims.begin()
    assert looks(claims, 0) == [(None, None)]


def test_a_look_that_did_not_succeed_is_repeated() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    claims.begin()
    (span,) = claims.due(0)
    assert claims.due(0) == [span]


def test_unanswered_claims_with_none_between_them_that_was_answered_share_their_looks() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    answered(claims, 1)
    for now in (2, 30):
        claims.begin()
        assert looks(claims, now) == [(after_noon(1), None)]
    assert looks(claims, 62) == []
    assert looks(claims, 90) == [(after_noon(1), None)]
    assert looks(claims, 200) == []


def test_unanswered_claims_with_an_answered_one_between_them_are_looked_for_apart() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    claims.begin()
    assert looks(claims, 2) == [(None, None)]
    answered(claims, 3)
    claims.begin()
    assert looks(claims, 4) == [(after_noon(3), None)]
    answered(claims, 5)
    assert looks(claims, 100) == [(None, after_noon(3)), (after_noon(3), after_noon(5))]
    assert looks(claims, 300) == []
