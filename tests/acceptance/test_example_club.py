"""Runs examples/club as its reader does: by psql, by the commands of its README, and by the lines of its crontab.

No PHP is installed where the tests run. So the statements of enqueue.php are taken from its text and executed in its
order, and the rest of that file is not tested.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import httpx
import psycopg
import pytest
from psycopg import sql as composable

from examples.club import club
from pgoutbox import Outbox, State, Transient
from pgoutbox.operations import Operator, Rate
from pgoutbox.testing import OutboxDriver
from pgoutbox.worker import Worker
from tests.support.dialogues import HOST
from tests.support.forks import LIBRARIES, forks
from tests.support.missing import server_missing
from tests.support.outbox_actions import settings_for
from tests.support.pages import DOCS, ROOT, blocks_of
from tests.support.roles import login
from tests.support.smtp_server import Inbox, accepting_server, mail_settings, parsed
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from aiosmtpd.smtp import SMTP, Envelope, Session

pytestmark = pytest.mark.slow

CLUB: Final = ROOT / "examples" / "club"
CRONTAB: Final = [line for line in (CLUB / "crontab").read_text().splitlines() if not line.startswith("#")]
NAME: Final = "Ada O'Hara\"); DROP TABLE registration; --"


class Host:
    """The shared host: the files of the example, its commands, and nearly no environment."""

    def __init__(self, folder: Path, dsn: str, smtp_port: int) -> None:
        self.folder = folder
        self.dsn = dsn
        shutil.copytree(CLUB, folder, dirs_exist_ok=True)
        program = folder / ".venv" / "bin" / "pgoutbox"
        program.parent.mkdir(parents=True)
        # The test of the dashboard sends it a signal.
        web = f'[ "$1" != web ] || exec "{sys.executable}" -m pgoutbox "$@"\n'
        forked = forks(*LIBRARIES).script("-m", "pgoutbox")
        program.write_text(f'#!/bin/sh\nexport PYTHONPATH="{ROOT}"\n{web}{forked}')
        program.chmod(0o700)
        self.set("PGOUTBOX_DSN", dsn)
        self.set("PGOUTBOX_SMTP_HOST", HOST)
        self.set("PGOUTBOX_SMTP_SENDER", "club@club.test")
        self.set("PGOUTBOX_SMTP_USERNAME", "")
        self.set("PGOUTBOX_SMTP_PASSWORD", "")
        with (folder / "worker.env").open("a") as file:
            file.write(f"PGOUTBOX_SMTP_PORT={smtp_port}\nPGOUTBOX_SMTP_SECURITY=none\n")

    def set(self, name: str, value: str) -> None:
        """Edit a line of worker.env."""
        path = self.folder / "worker.env"
        text, count = re.subn(
            rf"^{name}=.*$", lambda _: f"{name}='{value}'" if value else "", path.read_text(), flags=re.MULTILINE
        )
        assert count == 1, name
        path.write_text(text)

    @property
    def environment(self) -> dict[str, str]:
        """Return what cron gives to its commands."""
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LOGNAME": "club"}

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command by sh, and return its complete output."""
        return subprocess.run(
            [program("sh"), "-c", command.replace("/srv/club", str(self.folder))],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=4 * PROCESS_PATIENCE_SECONDS,
            check=False,
        )

    async def by_hand(self, command: str) -> str:
        """Run a command of pgoutbox with the settings of worker.env, and return its output."""
        done = await asyncio.to_thread(self.shell, f"set -a && . ./worker.env && set +a && .venv/bin/{command}")
        assert done.returncode == 0, done.stdout
        return done.stdout

    async def cron(self) -> dict[str, int]:
        """Run the first line of the crontab, and return the numbers in its last line of the log."""
        done = await asyncio.to_thread(self.shell, CRONTAB[0].split(maxsplit=5)[5])
        assert (done.returncode, done.stdout) == (0, "")
        *_, last = (self.folder / "worker.log").read_text().splitlines()
        run = json.loads(last)
        assert run["event"] == "run_done"
        return {name: count for name, count in run.items() if isinstance(count, int) and count}

    def psql(self, file: str, *, dsn: str | None = None, **variables: object) -> str:
        """Run a SQL file of the example by psql, and return its complete output."""
        given = [f"-v{name}={value}" for name, value in variables.items()]
        done = subprocess.run(
            [program("psql"), dsn or self.dsn, "-q", *given, "-f", file],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PROCESS_PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def program(name: str) -> str:
    """Return the path of a program, or skip the test."""
    return shutil.which(name) or server_missing(f"{name} is not installed")


def register_by_sql(host: Host, dsn: str, number: int, name: str = NAME, email: str = "ada@club.test") -> None:
    host.psql("enqueue.sql", dsn=dsn, number=number, name=name, email=email)


def register_by_php(host: Host, dsn: str, number: int, name: str = NAME, email: str = "ada@club.test") -> None:
    """Execute the statements of `register` in enqueue.php, in its order, and those of `catch` after an error."""
    source = (host.folder / "enqueue.php").read_text()
    texts = dict(re.findall(r"const (\w+) = <<<'SQL'\n(.*?)\n    SQL;", source, re.DOTALL))
    body = source.partition("function register(")[2].partition("\n}\n")[0]
    before, _, rest = body.partition("try {")
    tried, _, caught = rest.partition("} catch (PDOException")
    assert ("beginTransaction" in before, "$db->commit()" in caught) == (True, True)
    parameters = {"number": str(number), "name": name, "email": email}
    # Without a lock_timeout of its own, a statement that waits for a lock fails the test in the end.
    patience = f"-c statement_timeout={PROCESS_PATIENCE_SECONDS:g}s"
    with psycopg.connect(dsn, options=patience) as connection:

        def execute(part: str) -> None:
            for constant, _, text in re.findall(r"\$db->(?:prepare\((\w+)\)|exec\((['\"])(.*?)\2\))", part):
                statement = re.sub(r":(\w+)", r"%(\1)s", texts[constant] if constant else text)
                connection.execute(statement.encode(), parameters)

        execute(before)
        try:
            execute(tried)
        except psycopg.errors.QueryCanceled:
            raise
        except psycopg.Error:
            execute(caught)


PRODUCERS: Final[dict[str, Callable[[Host, str, int], None]]] = {"sql": register_by_sql, "php": register_by_php}


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    async with accepting_server() as inbox:
        yield inbox


@pytest.fixture
def host(dsn: str, inbox: Inbox, tmp_path: Path) -> Host:
    """The host after `pgoutbox migrate` and schema.sql."""
    host = Host(tmp_path, dsn, inbox.port)
    host.psql("schema.sql")
    return host


@pytest.fixture(params=PRODUCERS)
def register(request: pytest.FixtureRequest, host: Host, dsn: str) -> Callable[..., None]:
    """Register a person by the producer in SQL, and by the one in PHP."""

    def register(number: int, *, dsn: str = dsn) -> None:
        PRODUCERS[request.param](host, dsn, number)

    return register


def mails(inbox: Inbox) -> Counter[tuple[str, str]]:
    """Count the received mails by recipient and subject."""
    return Counter((recipient, parsed(m.content)["Subject"]) for m in inbox.received for recipient in m.recipients)


MEMBERS: Final = ("ada@club.test", "Your registration")
ORGANISERS: Final = ("organisers@example.org", "Registration 7")


def rows_of(db: psycopg.Connection) -> list[tuple[str, str | None]]:
    """Return state and reason of each message."""
    return db.execute("SELECT state, skip_reason FROM pgoutbox.message ORDER BY id").fetchall()


def numbers_of(db: psycopg.Connection) -> list[int]:
    """Return the registrations."""
    return [number for (number,) in db.execute("SELECT number FROM registration ORDER BY number")]


# --- the page ---------------------------------------------------------------------------------------------------------


@contextmanager
def shared_host_login(dsn: str) -> Iterator[str]:
    """Return the DSN of a login as web hosts give it: it may create objects in its database, and no roles."""
    with login(dsn, options="NOSUPERUSER NOCREATEROLE") as own, psycopg.connect(dsn, autocommit=True) as superuser:
        database = composable.Identifier(superuser.info.dbname)
        name = composable.Identifier(str(psycopg.conninfo.conninfo_to_dict(own)["user"]))
        superuser.execute(composable.SQL("GRANT CREATE ON DATABASE {} TO {}").format(database, name))
        superuser.execute(composable.SQL("GRANT CREATE ON SCHEMA public TO {}").format(name))
        yield own


def as_pattern(text: str) -> str:
    """Return a regular expression for an output: `...` is any text, and the width of spaces does not matter."""
    parts = [r"\s+".join(map(re.escape, part.split())) for part in text.split("...")]
    return r"\s*.*?\s*".join(parts)


async def test_the_page_prints_what_its_commands_print(empty_dsn: str, inbox: Inbox, tmp_path: Path) -> None:
    blocks = blocks_of(CLUB / "README.md")
    steps = [
        (block, answer) for block, answer in pairwise(blocks) if block.directive == "run" and answer.language == "text"
    ]
    assert len(steps) == [block.directive for block in blocks].count("run") > 5
    program("psql")
    with shared_host_login(empty_dsn) as own:
        host = Host(tmp_path, own, inbox.port)
        script = "set -e\n" + "".join(f"{block.text}echo '=== end'\n" for block, _ in steps)
        done = await asyncio.to_thread(host.shell, script)
        *outputs, rest = done.stdout.split("=== end\n")
        assert (done.returncode, rest) == (0, ""), done.stdout
        for (block, answer), output in zip(steps, outputs, strict=True):
            assert re.fullmatch(as_pattern(answer.text), output.strip(), re.DOTALL), f"{block.place}\n{output}"
    assert mails(inbox) == {("ada@example.org", "Your registration"): 1, ORGANISERS: 1}


def test_the_crontab_is_that_of_the_page_on_cron() -> None:
    page = (DOCS / "how-to" / "cron.md").read_text()
    assert len(CRONTAB) == 2
    for line in CRONTAB:
        assert f"\n{line.removesuffix(' --queue mail')}\n" in page


def test_each_file_is_listed() -> None:
    listed = (CLUB / "README.md").read_text()
    names = {path.name for path in CLUB.iterdir() if path.is_file()} - {"README.md"}
    assert len(names) == 7
    assert [name for name in sorted(names) if f"| [{name}]({name}) |" not in listed] == []


# --- registrations ----------------------------------------------------------------------------------------------------


async def test_a_registration_made_twice_has_each_mail_once(
    host: Host, register: Callable[..., None], db: psycopg.Connection, inbox: Inbox
) -> None:
    for _ in range(2):
        await asyncio.to_thread(register, 7)
    assert await host.cron() == {"sent": 2}
    await asyncio.to_thread(register, 7)
    assert await host.cron() == {}
    assert mails(inbox) == {MEMBERS: 1, ORGANISERS: 1}
    assert db.execute("SELECT number, name, email FROM registration").fetchall() == [(7, NAME, "ada@club.test")]


def test_another_payload_under_the_same_key_is_not_enqueued_and_not_an_error(
    register: Callable[..., None], db: psycopg.Connection
) -> None:
    db.execute("""SELECT pgoutbox.enqueue('mail.registration', '{"old": true}', dedupe_key => '7:member')""")
    register(7)
    assert numbers_of(db) == [7]
    keys = db.execute("SELECT dedupe_key, payload ? 'old' FROM pgoutbox.message ORDER BY id").fetchall()
    assert keys == [("7:member", True), ("7:organiser", False)]


def test_a_registration_outlives_a_lost_schema_and_gets_its_mails_after_the_repair(
    register: Callable[..., None], db: psycopg.Connection
) -> None:
    db.execute("ALTER SCHEMA pgoutbox RENAME TO lost")
    register(7)
    assert numbers_of(db) == [7]
    db.execute("ALTER SCHEMA lost RENAME TO pgoutbox")
    assert rows_of(db) == []
    register(7)
    assert rows_of(db) == [("pending", None)] * 2


def test_a_registration_outlives_a_lost_permission(
    register: Callable[..., None], db: psycopg.Connection, dsn: str
) -> None:
    with login(dsn) as own:
        db.execute("GRANT SELECT, INSERT, UPDATE ON registration TO PUBLIC")
        register(7, dsn=own)
    assert numbers_of(db) == [7]
    assert rows_of(db) == []


def test_a_registration_does_not_wait_for_a_locked_outbox(
    register: Callable[..., None], db: psycopg.Connection, connection: psycopg.Connection
) -> None:
    connection.execute("LOCK TABLE pgoutbox.message_live")
    register(7)
    connection.rollback()
    assert numbers_of(db) == [7]
    assert rows_of(db) == []


def test_the_sql_of_the_producers_agrees_with_the_definition(
    register: Callable[..., None], db: psycopg.Connection, connection: psycopg.Connection
) -> None:
    columns = "SELECT topic, queue, dedupe_key, owner, max_attempts, payload FROM pgoutbox.message ORDER BY id"
    register(7)
    by_sql = db.execute(columns).fetchall()
    db.execute("SELECT pgoutbox.erase(owner => 'registration-7')")
    for mail in ("member", "organiser"):
        wanted = club.RegistrationMail.model_validate({"registration": 7, "mail": mail})
        club.outbox.on(connection).enqueue(club.REGISTRATION_MAIL, wanted)
    connection.commit()
    assert db.execute(columns).fetchall() == by_sql
    assert len(by_sql) == 2


# --- registrations that go away ---------------------------------------------------------------------------------------


async def test_a_deleted_registration_has_no_mails_and_a_new_one_under_its_number_has(
    host: Host, register: Callable[..., None], db: psycopg.Connection, inbox: Inbox
) -> None:
    await asyncio.to_thread(register, 7)
    db.execute("DELETE FROM registration")
    assert await host.cron() == {"skipped": 2}
    assert rows_of(db) == [("skipped", "registration 7 was deleted")] * 2
    assert mails(inbox) == {}
    await asyncio.to_thread(register, 7)
    assert await host.cron() == {"sent": 2}
    assert mails(inbox) == {MEMBERS: 1, ORGANISERS: 1}


@pytest.mark.parametrize("is_sent", [False, True], ids=["waiting", "sent"])
async def test_a_withdrawn_registration_leaves_nothing_and_can_be_made_again(
    host: Host, db: psycopg.Connection, dsn: str, inbox: Inbox, is_sent: bool
) -> None:
    await asyncio.to_thread(register_by_sql, host, dsn, 7)
    if is_sent:
        assert await host.cron() == {"sent": 2}
    await asyncio.to_thread(host.psql, "withdraw.sql", number=7)
    assert (numbers_of(db), rows_of(db)) == ([], [])
    assert db.execute("SELECT FROM pgoutbox.dedupe").fetchall() == []
    inbox.received.clear()
    await asyncio.to_thread(register_by_sql, host, dsn, 7)
    assert await host.cron() == {"sent": 2}
    assert mails(inbox) == {MEMBERS: 1, ORGANISERS: 1}


def test_a_withdrawal_outlives_a_lost_schema(host: Host, db: psycopg.Connection, dsn: str) -> None:
    register_by_sql(host, dsn, 7)
    db.execute("ALTER SCHEMA pgoutbox RENAME TO lost")
    assert "are not erased" in host.psql("withdraw.sql", number=7)
    assert numbers_of(db) == []


# --- runs -------------------------------------------------------------------------------------------------------------


class StrictProvider(Inbox):
    """A mail server that takes 60 mails in any hour of its clock, and refuses the next one for good, as cPanel does."""

    def __init__(self) -> None:
        super().__init__()
        self.played_seconds = 0.0  # They pass in addition to the real time, as for the bucket.
        self.taken_at: list[float] = []
        self.refused_count = 0

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802 - aiosmtpd
        # The first mails take a minute to arrive, later ones none: that must not squeeze 61 into an hour.
        arrived_at = time.monotonic() + self.played_seconds + (60 if len(self.taken_at) < 5 else 0)
        if sum(taken > arrived_at - 3600 for taken in self.taken_at) >= 60:
            self.refused_count += 1
            return "550 Domain club.test has exceeded the max emails per hour (60/60 (100%)) allowed"
        self.taken_at.append(arrived_at)
        return await super().handle_DATA(server, session, envelope)


async def test_a_strict_provider_refuses_none_of_the_clubs_mails(
    db: psycopg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """90 registrations after an idle time. The hours are played: the bucket and the provider's clock age together."""
    monkeypatch.setenv("CLUB_ORGANISERS", "organisers@example.org")
    # A rate below the provider's limit leaves room for mails that arrive late.
    Operator(db).limit_rate("mail", Rate(55, 3600))
    db.execute((CLUB / "schema.sql").read_text().encode())
    provider = StrictProvider()
    async with accepting_server(provider) as inbox:
        outbox = Outbox(settings_for(dsn, **mail_settings(inbox.port)))
        outbox.handler(club.REGISTRATION_MAIL, transactional=True)(club.write_mail)
        for number in range(1, 91):
            db.execute("INSERT INTO registration (number, name, email) VALUES (%s, 'Ada', 'ada@club.test')", [number])
            mail = club.RegistrationMail(registration=number, mail="member")
            outbox.on(db).enqueue(club.REGISTRATION_MAIL, mail, require_transaction=False)
        while len(inbox.received) + provider.refused_count < 90:
            await Worker(outbox, queues=["mail"]).run_once()
            ((seconds,),) = db.execute(
                """
                WITH permit AS (
                    -- Null, and so 0, if the next mail may go now.
                    SELECT
                        greatest(0, extract(epoch FROM pgoutbox.next_permit_at('mail') - clock_timestamp()))::float8
                            AS seconds
                ), aged AS (
                    UPDATE pgoutbox.rate_claim SET claimed_at = claimed_at - make_interval(secs => p.seconds)
                    FROM permit AS p
                )
                UPDATE pgoutbox.queue SET tokens_at = tokens_at - make_interval(secs => p.seconds)
                FROM permit AS p
                RETURNING p.seconds
                """
            ).fetchall()
            provider.played_seconds += seconds
    assert db.execute("SELECT state, attempt_count, count(*) FROM pgoutbox.message GROUP BY 1, 2").fetchall() == [
        ("sent", 1, 90)
    ]
    assert provider.refused_count == 0
    assert provider.taken_at[54] - provider.taken_at[0] < 3600  # The rate is used, too.


async def test_an_hour_has_60_mails_of_which_five_may_go_at_once(host: Host, db: psycopg.Connection, dsn: str) -> None:
    await host.by_hand("pgoutbox limit mail --rate 60/hour --at-most 60/hour")
    for number in range(1, 8):
        await asyncio.to_thread(register_by_php, host, dsn, number)
    ((began,),) = db.execute("SELECT clock_timestamp()").fetchall()
    sent = 0
    for _ in range(2):
        sent += (await host.cron()).get("sent", 0)
        ((minutes,),) = db.execute("SELECT extract(epoch FROM clock_timestamp() - %s)::int / 60", [began]).fetchall()
        assert 5 <= sent <= 5 + minutes  # A slow machine may see the next token.


async def test_overlapping_runs_send_each_mail_once(host: Host, dsn: str, inbox: Inbox) -> None:
    for number in range(1, 11):
        register_by_php(host, dsn, number, email=f"member{number}@club.test")
    await asyncio.gather(*(host.cron() for _ in range(3)))
    expected = [(f"member{number}@club.test", "Your registration") for number in range(1, 11)]
    expected += [(ORGANISERS[0], f"Registration {number}") for number in range(1, 11)]
    assert mails(inbox) == Counter(expected)


def test_a_failed_mail_is_retried_after_1_5_15_and_60_minutes_and_parked_after_ten_attempts(
    host: Host, dsn: str, db: psycopg.Connection
) -> None:
    register_by_php(host, dsn, 7)
    db.execute("SELECT pgoutbox.cancel(m.id) FROM pgoutbox.message AS m WHERE dedupe_key = '7:organiser'")
    driver = OutboxDriver(club.outbox, dsn)
    driver.answer_with(lambda _: Transient("451 busy"))
    delays: list[int] = []
    for attempt in range(1, 11):
        with driver.expect_failed() if attempt == 10 else nullcontext():
            driver.run_pass()
        ((state, delay),) = db.execute(
            """
            SELECT m.state, extract(epoch FROM m.available_at - a.ended_at)
            FROM pgoutbox.message AS m
            JOIN pgoutbox.attempt_view AS a ON a.message_id = m.id AND a.attempt_count = m.attempt_count
            WHERE m.dedupe_key = '7:member'
            """
        ).fetchall()
        if state == "pending":
            delays.append(round(delay))
            driver.make_due()
    assert delays == [60, 300, 900, *[3600] * 6]
    assert driver.messages(state=State.FAILED)[0].attempt_count == 10


# --- operations -------------------------------------------------------------------------------------------------------


async def test_test_mode_redirects_the_mails_of_members_only(host: Host, dsn: str, inbox: Inbox) -> None:
    register_by_php(host, dsn, 7)
    await host.by_hand("pgoutbox redirect set @test.club.test --for 2h")
    assert await host.cron() == {"sent": 2}
    assert mails(inbox) == {("ada=club.test@test.club.test", "Your registration"): 1, ORGANISERS: 1}


async def test_the_season_refuses_test_mode(host: Host) -> None:
    with psycopg.connect(host.dsn) as owner:
        owner.execute("INSERT INTO pgoutbox.blackout VALUES ('2000-01-01', '2999-12-31', 'Europe/Berlin')")
    done = await asyncio.to_thread(
        host.shell, "set -a && . ./worker.env && set +a && .venv/bin/pgoutbox redirect set @test.club.test --for 2h"
    )
    assert (done.returncode, "refused within the blackout 2000-01-01" in done.stdout) == (1, True), done.stdout


@contextmanager
def admin_page(host: Host) -> Iterator[httpx.Client]:
    """Start the admin page by the commands of the README, and sign in with the token that they print."""
    (block,) = [block for block in blocks_of(CLUB / "README.md", "sh") if "ssh -L" in block.text]
    commands = block.text.partition("\n")[2].replace("/srv/club", str(host.folder))
    output = host.folder / "web.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [program("sh"), "-c", commands.replace(".venv/bin/pgoutbox web", "exec .venv/bin/pgoutbox web --port 0")],
            env=host.environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "http://" in output.read_text() or process.poll() is not None, output.read_text)
        assert process.poll() is None, output.read_text()
        (token,) = re.findall(r"^ada:(\S+)$", output.read_text(), re.MULTILINE)
        (url,) = re.findall(r"http://\S+\d", output.read_text())
        with httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=PROCESS_PATIENCE_SECONDS
        ) as client:
            yield client
    finally:
        process.terminate()
        process.wait(PROCESS_PATIENCE_SECONDS)


async def test_the_admin_page_counts_and_redrives_a_mail_whose_address_was_corrected(
    host: Host, dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    register_by_php(host, dsn, 7, email="ada at the club")
    assert await host.cron() == {"sent": 1, "failed": 1}
    db.execute("UPDATE registration SET email = 'ada@club.test'")

    def redrive() -> None:
        with admin_page(host) as client:
            words = " ".join(re.sub(r"<[^>]*>", " ", client.get("/").text).split())
            for state, count in (("pending", 0), ("sending", 0), ("sent", 1), ("failed", 1)):
                assert re.search(rf"{state} {count} exact", words), words
            assert client.post("/bulk", data={"do": "redrive", "state": "failed"}).status_code == 303
            wait_until(lambda: ("pending", None) in rows_of(db), lambda: str(rows_of(db)))

    await asyncio.to_thread(redrive)
    assert await host.cron() == {"sent": 1}
    assert mails(inbox) == {MEMBERS: 1, ORGANISERS: 1}
    assert rows_of(db) == [("sent", None)] * 2
