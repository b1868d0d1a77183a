"""The statements of a worker's trip, for programs that deliver without a worker: one lane of fresh messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.options import CLAIM_PARAMETERS
from pgoutbox.database.store import ClaimedRow
from pgoutbox.kernel import statements
from pgoutbox.kernel.run import array
from pgoutbox.kernel.seams import Row, Step

_AVAILABLE_AT: Final = ClaimedRow._fields.index("available_at")
_CLAIMED_AT: Final = ClaimedRow._fields.index("claimed_at")


def claim(total: int, *, after: Row | None = None) -> Step:
    """Return a claim from the beginning, or after a row."""
    place: dict[str, Any] = {} if after is None else {"after_ats": [after[_AVAILABLE_AT]], "after_ids": [after[0]]}
    return statements.CLAIM_WITHOUT_KEYS, {**CLAIM_PARAMETERS, "total": total, **place}


def last_of(rows: Sequence[Row]) -> Row:
    """Return the row after which the next claim begins. A claim returns its rows in no order."""
    return max(rows, key=lambda row: (row[_AVAILABLE_AT], row[0]))


def finish(rows: Sequence[Row]) -> list[Step]:
    """Return the steps that end the first attempts of a claim as sent, and then the claim."""
    worker = CLAIM_PARAMETERS["worker"]
    claimed_ats = list({row[_CLAIMED_AT] for row in rows})
    held = {"ids": array(row[0] for row in rows), "claimed_ats": claimed_ats, "attempt_count": 1, "worker": worker}
    return [
        (statements.FINISH_SENT, held),
        (statements.END_CLAIMS, {"worker": worker, "claimed_ats": claimed_ats}),
    ]
