"""The driver of the pytest plugin: a bug of a handler makes the test red, in one run of pytest on tests of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

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


RAISES: Final = {
    topic: f"put({topic!r})\ndriver.assert_enqueued({topic!r})\ndriver.run_pass()"
    for topic in ("lookup", "thread", "batch")
}
EXPECTED: Final = {
    name: f"put('lookup')\nwith {block} as raised:\n    driver.run_pass()\n"
    "assert [type(one) for one in raised] == [KeyError]\ndriver.drain()"
    for name, block in {
        "any": "driver.expect_raised()",
        "matching": "driver.expect_raised(LookupError, match='abs.nt')",
        "of_type": "driver.expect_raised(KeyError)",
    }.items()
}
UNEXPECTED: Final = {
    name: f"put('lookup')\nwith {block}:\n    driver.run_pass()"
    for name, block in {
        "other_type": "driver.expect_raised(ValueError)",
        "other_text": "driver.expect_raised(match='gone')",
    }.items()
}
ANSWERS: Final = {
    f"answer_{number}": f"put('say')\ndriver.answer_with(lambda delivery: {answer})\ndriver.run_pass()"
    for number, answer in enumerate(("None", "Sent", "'sent'"))
}
NONE_RAISES: Final = (
    "put('lookup', bugs=0)\nwith driver.expect_raised(KeyError, match='absent'):\n    driver.run_pass()"
)
PASSING: Final = {
    "expected_failure": (
        "put('lookup', bugs=3)\nwith driver.expect_failed('lookup', match='KeyError') as failed:\n    driver.drain()\n"
        "assert failed[0].attempt_count == 3"
    ),
    "raised_outcome": "put('busy')\ndriver.run_pass()",
    "refused_delivery": (
        "put('say')\ndriver.answer_with(lambda delivery: Permanent('no such user'))\n"
        "with driver.expect_failed(match='no such user'):\n    driver.run_pass()"
    ),
}
TESTS: Final = {**RAISES, **EXPECTED, **UNEXPECTED, **ANSWERS, "none_raises": NONE_RAISES, **PASSING}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Mapping[str, str]:
    """Run all tests with these bodies, and return the report of each that failed."""
    directory = tmp_path_factory.mktemp("driver")
    bodies = [f"def test_{name}(driver, put):\n{textwrap.indent(body, '    ')}\n" for name, body in TESTS.items()]
    (directory / "test_it.py").write_text("\n\n".join([HEAD, *bodies]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "test_it.py"],
        cwd=directory,
        env={"PGOUTBOX_TEST_DSN": server.dsn_for("postgres"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    cases = list(ET.parse(directory / "report.xml").iter("testcase"))
    assert {case.get("name") for case in cases} == {f"test_{name}" for name in TESTS}
    return {
        str(case.get("name")).removeprefix("test_"): "".join(text for problem in case for text in problem.itertext())
        for case in cases
        if len(case)
    }


@pytest.mark.parametrize("name", RAISES)
def test_a_handler_that_raises_makes_the_test_red(reports: Mapping[str, str], name: str) -> None:
    assert (
        "1 attempt raised an exception. If the test expects that, deliver in `with driver.expect_raised():`"
        in reports[name]
    )
    assert '{}["absent"]' in reports[name]
    assert "KeyError: 'absent'" in reports[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_test_may_expect_that_a_handler_raises(reports: Mapping[str, str], name: str) -> None:
    assert name not in reports


@pytest.mark.parametrize("name", UNEXPECTED)
def test_another_exception_than_the_expected_one_makes_the_test_red(reports: Mapping[str, str], name: str) -> None:
    assert "1 attempt raised an exception." in reports[name]


def test_an_expected_exception_that_no_handler_raises_makes_the_test_red(reports: Mapping[str, str]) -> None:
    assert (
        "expect_raised: a handler should have raised KeyError that matches 'absent', but none has"
        in reports["none_raises"]
    )


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_no_outcome_is_refused(reports: Mapping[str, str], name: str) -> None:
    assert "TypeError: answer_with: return an Outcome such as Sent(), not " in reports[name]


@pytest.mark.parametrize("name", PASSING)
def test_expected_failures_raised_outcomes_and_refusals_are_no_bugs(reports: Mapping[str, str], name: str) -> None:
    assert name not in reports
