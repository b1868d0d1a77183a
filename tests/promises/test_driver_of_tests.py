"""The driver of the pytest plugin: a bug of a handler makes the test red, in a run of pytest on a file of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Server

HEAD: Final = """
import psycopg
import pytest
from pgoutbox import Email, Message, Outbox, Permanent, RetryPolicy, Sent, SyncContext, Transient

outbox = Outbox()

@outbox.handler("lookup", retry=RetryPolicy.steps(1, max_attempts=3))
async def look_up(message: Message, ctx: object) -> None:
    if message.attempt_count <= message.payload["bugs"]:
        {}["absent"]

@outbox.handler("thread")
def look_up_in_a_thread(message: Message, ctx: SyncContext) -> None:
    {}["absent"]

@outbox.batch_handler("batch")
def look_up_all(messages: object, contexts: object) -> None:
    {}["absent"]

@outbox.handler("busy")
async def be_busy(message: Message, ctx: object) -> None:
    raise Transient("busy")

@outbox.handler("say")
async def say(message: Message, ctx: object) -> object:
    return Email(to="ada@example.org", subject="Hello", text="Hello")

@pytest.fixture
def driver(pgoutbox_driver):
    return pgoutbox_driver(outbox)

@pytest.fixture
def put(pgoutbox_dsn):
    def put(topic, bugs=1):
        with psycopg.connect(pgoutbox_dsn) as connection:
            outbox.on(connection).enqueue(topic, {"bugs": bugs})
    return put

"""


@pytest.fixture
def run_test(tmp_path: Path, server: Server) -> Callable[[str], str]:
    """Run one test with this body, and return the summary and the report of pytest."""

    def run(body: str) -> str:
        (tmp_path / "test_it.py").write_text(f"{HEAD}def test_it(driver, put):\n{textwrap.indent(body, '    ')}\n")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
            cwd=tmp_path,
            env={"PGOUTBOX_TEST_DSN": server.dsn_for("postgres"), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("topic", ["lookup", "thread", "batch"])
def test_a_handler_that_raises_makes_the_test_red(run_test: Callable[[str], str], topic: str) -> None:
    report = run_test(f"put({topic!r})\ndriver.assert_enqueued({topic!r})\ndriver.run_pass()")
    assert "1 failed" in report
    assert (
        "1 attempt raised an exception. If the test expects that, deliver in `with driver.expect_raised():`" in report
    )
    assert '{}["absent"]' in report
    assert "KeyError: 'absent'" in report


@pytest.mark.parametrize(
    "block",
    ["driver.expect_raised()", "driver.expect_raised(LookupError, match='abs.nt')", "driver.expect_raised(KeyError)"],
)
def test_a_test_may_expect_that_a_handler_raises(run_test: Callable[[str], str], block: str) -> None:
    body = f"put('lookup')\nwith {block} as raised:\n    driver.run_pass()\n"
    assert "1 passed" in run_test(f"{body}assert [type(one) for one in raised] == [KeyError]\ndriver.drain()")


@pytest.mark.parametrize("block", ["driver.expect_raised(ValueError)", "driver.expect_raised(match='gone')"])
def test_another_exception_than_the_expected_one_makes_the_test_red(run_test: Callable[[str], str], block: str) -> None:
    report = run_test(f"put('lookup')\nwith {block}:\n    driver.run_pass()")
    assert "1 attempt raised an exception." in report


def test_an_expected_exception_that_no_handler_raises_makes_the_test_red(run_test: Callable[[str], str]) -> None:
    report = run_test(
        "put('lookup', bugs=0)\nwith driver.expect_raised(KeyError, match='absent'):\n    driver.run_pass()"
    )
    assert "expect_raised: a handler should have raised KeyError that matches 'absent', but none has" in report


def test_exceptions_on_the_way_to_an_expected_failure_are_expected(run_test: Callable[[str], str]) -> None:
    body = (
        "put('lookup', bugs=3)\nwith driver.expect_failed('lookup', match='KeyError') as failed:\n    driver.drain()\n"
    )
    assert "1 passed" in run_test(f"{body}assert failed[0].attempt_count == 3")


def test_an_outcome_that_a_handler_raises_is_no_bug(run_test: Callable[[str], str]) -> None:
    assert "1 passed" in run_test("put('busy')\ndriver.run_pass()")


@pytest.mark.parametrize("answer", ["None", "Sent", "'sent'"])
def test_an_answer_that_is_no_outcome_is_refused(run_test: Callable[[str], str], answer: str) -> None:
    report = run_test(f"put('say')\ndriver.answer_with(lambda delivery: {answer})\ndriver.run_pass()")
    assert "1 failed" in report
    assert "TypeError: answer_with: return an Outcome such as Sent(), not " in report


def test_an_answer_may_refuse_a_delivery(run_test: Callable[[str], str]) -> None:
    body = "put('say')\ndriver.answer_with(lambda delivery: Permanent('no such user'))\n"
    assert "1 passed" in run_test(f"{body}with driver.expect_failed(match='no such user'):\n    driver.run_pass()")
