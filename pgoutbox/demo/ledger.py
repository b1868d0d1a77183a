"""The ledger: the committed messages, the received e-mails and the rows of the table must agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import psycopg

from pgoutbox.demo.mailbox import GONE, Receipt
from pgoutbox.demo.service import Enqueued, Kind


@dataclass(frozen=True, slots=True)
class Row:
    """One message in the table."""

    id: int
    state: str
    attempt_count: int
    superseded_by: int | None
    lost_count: int


@dataclass
class Verdict:
    """The result of the comparison. The ledger balances if `problems` is empty."""

    committed: Counter[Kind] = field(default_factory=Counter)
    rolled_back: int = 0
    states: Counter[str] = field(default_factory=Counter)
    received: int = 0
    distinct: int = 0
    unavoidable_duplicates: int = 0
    superseded: int = 0
    retried: int = 0
    latency_p50_ms: float = math.nan
    latency_p99_ms: float = math.nan
    problems: list[str] = field(default_factory=list)


ROWS = """
SELECT
    m.id,
    m.state,
    m.attempt_count,
    m.superseded_by,
    jsonb_array_length(jsonb_path_query_array(coalesce(m.attempts, '[]'), '$[*] ? (@.outcome == "lost")')) AS lost_count
FROM pgoutbox.message AS m
ORDER BY m.id
"""


def read_rows(connection: psycopg.Connection) -> dict[int, Row]:
    """Return the rows of the table, by message id."""
    return {row[0]: Row(*row) for row in connection.execute(ROWS)}


def balance(
    committed: Sequence[Enqueued], rolled_back: Sequence[Enqueued], receipts: Sequence[Receipt], rows: dict[int, Row]
) -> Verdict:
    """Compare the commits, the e-mails and the rows. Latency counts first attempts of messages without a delay."""
    copies = Counter(receipt.message_id for receipt in receipts)
    verdict = Verdict(rolled_back=len(rolled_back), received=len(receipts), distinct=len(copies))
    _check_existence(verdict, committed, rolled_back, copies, rows)
    first_received_at = {receipt.message_id: receipt.received_at for receipt in reversed(receipts)}
    latencies_ms = []
    for message in committed:
        row = rows.get(message.id)
        if row is None:
            continue
        verdict.committed[message.kind] += 1
        verdict.states[row.state] += 1
        verdict.retried += row.attempt_count > 1
        verdict.superseded += row.superseded_by is not None
        _check_message(verdict, message, row, copies[message.id])
        if message.kind != "password_reset" and row.attempt_count == 1 and message.id in first_received_at:
            latencies_ms.append(round(1000 * (first_received_at[message.id] - message.committed_at), 3))
    if latencies_ms:
        latencies_ms.sort()
        verdict.latency_p50_ms = latencies_ms[len(latencies_ms) // 2]
        verdict.latency_p99_ms = latencies_ms[len(latencies_ms) * 99 // 100]
    if len({receipt.header for receipt in receipts}) != len(copies):
        verdict.problems.append("a message was received twice under different Message-IDs")
    _check_newest_wins(verdict, committed, receipts)
    return verdict


def _check_existence(
    verdict: Verdict,
    committed: Sequence[Enqueued],
    rolled_back: Sequence[Enqueued],
    copies: Counter[int],
    rows: dict[int, Row],
) -> None:
    ids = {message.id for message in committed}
    for lost in sorted(ids - rows.keys()):
        verdict.problems.append(f"message {lost} was committed and is not in the table")
    for ghost in sorted(rows.keys() - ids):
        verdict.problems.append(f"message {ghost} is in the table and was never committed")
    for message in rolled_back:
        if message.id in copies:
            verdict.problems.append(f"message {message.id} was rolled back and delivered")
    for ghost in sorted(copies.keys() - ids):
        verdict.problems.append(f"message {ghost} was delivered and never committed")


def _check_message(verdict: Verdict, message: Enqueued, row: Row, copies: int) -> None:
    problems = verdict.problems
    match row.state:
        case "sent" if copies == 0:
            problems.append(f"message {message.id} says sent and was never received")
        case "failed" if message.recipient != GONE:
            problems.append(f"message {message.id} to a good mailbox failed")
        case "failed" | "skipped" | "cancelled" if copies > row.lost_count:
            problems.append(f"message {message.id} says {row.state} and was received")
        case "pending" | "sending":
            problems.append(f"message {message.id} is still {row.state}")
        case _:
            pass
    if copies > 1:
        verdict.unavoidable_duplicates += copies - 1
        if copies - 1 > row.lost_count:
            problems.append(
                f"message {message.id} was received {copies} times, but only {row.lost_count} attempts were lost"
            )


def _check_newest_wins(verdict: Verdict, committed: Sequence[Enqueued], receipts: Sequence[Receipt]) -> None:
    resets = {message.id: message.recipient for message in committed if message.kind == "password_reset"}
    latest: dict[str, int] = {}
    for receipt in receipts:
        recipient = resets.get(receipt.message_id)
        if recipient is None:
            continue
        if receipt.message_id < latest.get(recipient, 0):
            verdict.problems.append(f"the older reset {receipt.message_id} reached {recipient} after a newer one")
        latest[recipient] = max(latest.get(recipient, 0), receipt.message_id)
    newest: dict[str, int] = {}
    for message_id, recipient in resets.items():
        newest[recipient] = max(newest.get(recipient, 0), message_id)
    for recipient, message_id in newest.items():
        if recipient != GONE and latest.get(recipient) != message_id:
            verdict.problems.append(f"{recipient} did not get the newest reset, {message_id}")
