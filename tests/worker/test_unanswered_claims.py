"""Tests between which claims a worker searches for the attempts of its unanswered claims."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pgoutbox.worker.unanswered_claims import UnansweredClaims

NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
AGAIN_SECONDS = 60.0


def after_noon(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def looks(claims: UnansweredClaims, now: float) -> list[tuple[datetime | None, datetime | None]]:
    """Search every span that is due."""
    spans = claims.due(now)
    for span in spans:
        claims.note_searched(span, now)
    return [(span.after, span.before) for span in spans]


def answered(claims: UnansweredClaims, seconds: float) -> None:
    claims.begin()
    claims.end(after_noon(seconds))


def test_there_is_no_search_while_every_claim_is_answered() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    answered(claims, 1)
    claims.begin()
    claims.end()
    assert looks(claims, 2) == []


def test_an_unanswered_claim_is_searched_for_twice_between_answered_claims() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    answered(claims, 1)
    claims.begin()
    assert looks(claims, 2) == [(after_noon(1), None)]
    claims.begin()
    claims.end()  # It began nothing, so its time is unknown.
    answered(claims, 3)
    answered(claims, 4)
    assert looks(claims, 61) == []
    assert looks(claims, 62) == [(after_noon(1), after_noon(3))]
    assert looks(claims, 200) == []


def test_after_an_unanswered_first_claim_the_search_covers_everything() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    claims.begin()
    assert looks(claims, 0) == [(None, None)]


def test_a_failed_search_is_repeated() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    claims.begin()
    (span,) = claims.due(0)
    assert claims.due(0) == [span]


def test_consecutive_unanswered_claims_share_their_searches() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    answered(claims, 1)
    for now in (2, 30):
        claims.begin()
        assert looks(claims, now) == [(after_noon(1), None)]
    assert looks(claims, 62) == []
    assert looks(claims, 90) == [(after_noon(1), None)]
    assert looks(claims, 200) == []


def test_unanswered_claims_with_an_answered_one_between_them_have_separate_searches() -> None:
    claims = UnansweredClaims(again_seconds=AGAIN_SECONDS)
    claims.begin()
    assert looks(claims, 2) == [(None, None)]
    answered(claims, 3)
    claims.begin()
    assert looks(claims, 4) == [(after_noon(3), None)]
    answered(claims, 5)
    assert looks(claims, 100) == [(None, after_noon(3)), (after_noon(3), after_noon(5))]
    assert looks(claims, 300) == []
