"""Tests the demo, which runs the main task with realistic input: its ledger balances, and notices when it does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pgoutbox.demo.ledger import Row, balance
from pgoutbox.demo.mailbox import Receipt
from pgoutbox.demo.service import Enqueued


@pytest.mark.slow
def test_the_demo_runs_and_its_ledger_balances() -> None:
    command = [sys.executable, "-m", "pgoutbox", "demo", "--people", "100", "--seed", "7", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["problems"] == []
    assert answer["unavoidable_duplicates"] >= 1
    assert answer["superseded"] > 0
    assert answer["states"]["failed"] == 1


COMMITTED = [Enqueued(1, "activation", "a@example.org"), Enqueued(2, "password_reset", "a@example.org")]
ROLLED_BACK = [Enqueued(3, "activation", "b@example.org")]
ROWS = {1: Row(1, "sent", 1, None, 0), 2: Row(2, "sent", 1, None, 0)}


def receipt(message_id: int, *, header: str | None = None) -> Receipt:
    return Receipt(message_id, header or f"<{message_id}>", "a@example.org", "subject", 1.0)


@pytest.mark.parametrize(
    ("receipts", "rows", "problem"),
    [
        ([receipt(1)], ROWS, "never received"),
        ([receipt(1), receipt(1), receipt(2)], ROWS, "received 2 times"),
        ([receipt(1), receipt(2), receipt(3)], ROWS, "never committed"),
        ([receipt(1), receipt(2)], {1: ROWS[1]}, "not in the table"),
        ([receipt(1), receipt(2)], ROWS | {9: Row(9, "sent", 1, None, 0)}, "never committed"),
        ([receipt(1), receipt(2)], ROWS | {1: Row(1, "pending", 1, None, 0)}, "still pending"),
        ([receipt(1), receipt(2)], ROWS | {1: Row(1, "failed", 3, None, 0)}, "good mailbox failed"),
        ([receipt(1), receipt(2)], ROWS | {1: Row(1, "skipped", 0, 2, 0)}, "says skipped and was received"),
        (
            [receipt(1), receipt(1, header="<other>"), receipt(2)],
            ROWS | {1: Row(1, "sent", 2, None, 1)},
            "different Message-IDs",
        ),
    ],
)
def test_the_ledger_reports_an_imbalance(receipts: list[Receipt], rows: dict[int, Row], problem: str) -> None:
    verdict = balance(COMMITTED, [], receipts, rows)
    assert any(problem in found for found in verdict.problems), verdict.problems


def test_the_ledger_reports_a_delivered_rollback_and_an_older_reset_after_a_newer_one() -> None:
    resets = [Enqueued(n, "password_reset", "a@example.org") for n in (1, 2)]
    verdict = balance(resets, ROLLED_BACK, [receipt(2), receipt(1), receipt(3)], ROWS)
    assert any("was rolled back and delivered" in problem for problem in verdict.problems)
    assert any("after a newer one" in problem for problem in verdict.problems)


def test_the_ledger_accepts_a_balanced_run() -> None:
    assert balance(COMMITTED, ROLLED_BACK, [receipt(1), receipt(2)], ROWS).problems == []
