"""Tests the sendmail transport with small programs for each answer, and with those of Debian's Postfix and Exim."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox import Attachment, Context, Email, Message, Outbox, RawEmail
from pgoutbox.doctor import Level, examine
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Outcome, Permanent, SendFailure, Sent, Snooze, State, Transient, Unavailable
from pgoutbox.settings import Settings, load_settings
from pgoutbox.transports import SendmailTransport
from pgoutbox.transports.registry import build
from pgoutbox.transports.smtp import sendmail
from pgoutbox.worker import Worker
from tests.support.mail_servers import LOCAL_DOMAIN, LOCAL_USER, running_exim, running_postfix
from tests.support.outbox_actions import PATIENCE_SECONDS, enqueue, row_of, settings_for
from tests.support.sends import closed_gate, error_of, outgoing
from tests.support.settings import settings_with
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

SENDER = "club@example.org"
EMAIL = Email(to="ann@example.com", subject="Hello", text="Hi\n.\nBye")


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    """Write an executable script with this body."""

    def write(body: str) -> Path:
        path = tmp_path / "sendmail"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write


def transport_for(path: Path | str, **overrides: object) -> SendmailTransport:
    return SendmailTransport(settings_with(sendmail=str(path), smtp_sender=SENDER, **overrides))


def recording(tmp_path: Path) -> str:
    """Return the body of a program that writes its arguments, one a line, and its input to files."""
    return f'printf "%s\\n" "$@" >{tmp_path}/arguments\ncat >{tmp_path}/input'


# --- the call ---------------------------------------------------------------------------------------------------------


async def test_the_program_gets_the_envelope_as_arguments_and_the_email_as_input(
    program: Callable[[str], Path], tmp_path: Path
) -> None:
    transport = transport_for(program(recording(tmp_path)))
    email = Email(to="Ann Lee <ann@example.com>", bcc="eve@example.net", subject="Hello", text="Hi\n.\nBye")
    assert await transport.send(outgoing(), email) == Sent()
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments == ["-i", "-f", SENDER, "--", "ann@example.com", "eve@example.net"]
    found = (tmp_path / "input").read_bytes()
    assert b"\r" not in found
    assert b"To: Ann Lee <ann@example.com>\n" in found
    assert b"eve" not in found
    assert found.endswith(b"\n\nHi\n.\nBye\n")


async def test_an_email_without_bounces_has_the_null_sender(program: Callable[[str], Path], tmp_path: Path) -> None:
    transport = transport_for(program(recording(tmp_path)))
    email = RawEmail(data=b"Subject: x\r\n\r\n\xff\r\n", to="zoë@example.com", envelope_sender="")
    assert await transport.send(outgoing(), email) == Sent()
    assert (tmp_path / "arguments").read_text().splitlines() == ["-i", "-f", "<>", "--", "zoë@example.com"]
    assert (tmp_path / "input").read_bytes() == b"Subject: x\n\n\xff\n"


@pytest.mark.parametrize(
    "address",
    [
        "-oQ/tmp@example.org",
        "-t@example.org",
        "--@example.org",
        "a@example.org\n-t",
        "a@example.org\0b",
        "a b@example.org",
    ],
)
@pytest.mark.parametrize("place", ["to", "destination", "sender", "envelope_sender"])
async def test_no_address_becomes_an_option_or_another_argument(
    program: Callable[[str], Path], tmp_path: Path, address: str, place: str
) -> None:
    transport = transport_for(program(recording(tmp_path)))
    options: dict[str, Any] = {"to": "ann@example.com"}
    destination = None
    if place == "destination":
        options, destination = {}, f"mailto:{address}"
    else:
        options[place] = address
    try:
        outcome = await transport.send(outgoing(destination=destination), Email(subject="Hello", text="Hi", **options))
    except Permanent as refusal:
        outcome = refusal
    # Only the sender of the envelope is an argument.
    if place == "sender" and address.startswith("-"):
        place = "envelope_sender"
    assert isinstance(outcome, Permanent), (place, outcome)
    assert not (tmp_path / "arguments").exists()


async def test_a_name_that_a_shell_would_expand_stays_one_argument(
    program: Callable[[str], Path], tmp_path: Path
) -> None:
    transport = transport_for(program(recording(tmp_path)))
    hostile = ["$(touch${IFS}x)@example.org".replace("(", "{").replace(")", "}"), "`id`@example.org", "|id@example.org"]
    assert await transport.send(outgoing(), Email(to=hostile, subject="Hello", text="Hi")) == Sent()
    assert (tmp_path / "arguments").read_text().splitlines()[4:] == hostile


async def test_the_redirect_replaces_the_recipients(program: Callable[[str], Path], tmp_path: Path) -> None:
    transport = transport_for(program(recording(tmp_path)), redirect_to="tester@example.org")
    assert await transport.send(outgoing(), EMAIL) == Sent()
    assert (tmp_path / "arguments").read_text().splitlines()[4:] == ["tester@example.org"]
    assert "X-Pgoutbox-Original-To: ann@example.com" in (tmp_path / "input").read_text()


async def test_the_gate_is_asked_before_the_program_starts(program: Callable[[str], Path], tmp_path: Path) -> None:
    transport = transport_for(program(recording(tmp_path)))
    with closed_gate() as asked:
        assert isinstance(await transport.send(outgoing(), EMAIL), Snooze)
    assert asked == [None]
    assert not (tmp_path / "arguments").exists()


async def test_the_gate_is_asked_again_after_the_wait_for_a_turn(
    program: Callable[[str], Path], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "gate")
    transport = transport_for(
        program(f"cat >/dev/null; echo x >>{tmp_path}/started; cat {tmp_path}/gate"), smtp_connections=1
    )
    first = asyncio.create_task(transport.send(outgoing(), EMAIL))
    await until((tmp_path / "started").exists)
    with closed_gate() as asked:
        # It asks with an open gate first, and with a closed one after its wait.
        second = asyncio.create_task(transport.send(outgoing(), EMAIL))
        await until(lambda: len(asked) == 1)
        assert isinstance(await second, Snooze)
    await asyncio.to_thread((tmp_path / "gate").write_text, "")
    assert await first == Sent()
    assert (tmp_path / "started").read_text() == "x\n"


# --- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (65, Permanent, "exit code 65 (EX_DATAERR): user unknown"),
        (67, Permanent, "exit code 67 (EX_NOUSER): user unknown"),
        (68, Permanent, "exit code 68 (EX_NOHOST): user unknown"),
        (75, SendFailure, "exit code 75 (EX_TEMPFAIL): user unknown"),
        (70, SendFailure, "exit code 70 (EX_SOFTWARE): user unknown"),
        (1, SendFailure, "exit code 1: user unknown"),
        (64, Unavailable, "exit code 64 (EX_USAGE): user unknown"),
        (69, Unavailable, "exit code 69 (EX_UNAVAILABLE): user unknown"),
        (77, Unavailable, "exit code 77 (EX_NOPERM): user unknown"),
        (78, Unavailable, "exit code 78 (EX_CONFIG): user unknown"),
        (127, Unavailable, "exit code 127: user unknown"),
    ],
)
async def test_each_exit_code_is_an_outcome_with_the_text_of_stderr(
    program: Callable[[str], Path], code: int, kind: type[Any], text: str
) -> None:
    path = program(f"cat >/dev/null; printf 'user\\n\\033 unknown\\n' >&2; exit {code}")
    outcome = await transport_for(path).send(outgoing(), EMAIL)
    assert error_of(outcome, kind) == f"{path}: {text}"
    assert type(outcome) is kind
    if isinstance(outcome, (SendFailure, Unavailable)):
        assert outcome.doubtful == "mailto:ann@example.com"
    if isinstance(outcome, SendFailure):
        assert (outcome.outage, outcome.unknown) == (True, False)


async def test_a_program_without_a_text_is_told_apart(program: Callable[[str], Path]) -> None:
    outcome = await transport_for(program("cat >/dev/null; exit 75")).send(outgoing(), EMAIL)
    assert error_of(outcome, Transient).endswith("exit code 75 (EX_TEMPFAIL): no text on stderr")


async def test_a_program_that_a_signal_ends_leaves_an_unknown_outcome(program: Callable[[str], Path]) -> None:
    outcome = await transport_for(program("cat >/dev/null; kill -9 $$")).send(outgoing(), EMAIL)
    assert isinstance(outcome, SendFailure)
    assert (outcome.unknown, outcome.error.partition(": ")[2]) == (True, "ended by signal 9, outcome unknown")


@pytest.mark.slow
async def test_output_without_end_is_read_and_cut(program: Callable[[str], Path]) -> None:
    path = program("head -c 3000000 /dev/zero | tr '\\0' x; head -c 3000000 /dev/zero | tr '\\0' y >&2; exit 67")
    error = error_of(await transport_for(path).send(outgoing(), EMAIL), Permanent)
    assert "y" * 100 in error
    assert len(error) < 700


@pytest.mark.slow
async def test_a_program_that_ends_without_reading_a_large_email_has_not_sent_it(
    program: Callable[[str], Path],
) -> None:
    large = Email(to="ann@example.com", subject="Hello", attachments=[Attachment("a", b"x" * 3_000_000)], text="Hi")
    for body in ("exit 0", "head -c 1 >/dev/null; exit 0"):
        outcome = await transport_for(program(body)).send(outgoing(), large)
        assert isinstance(outcome, SendFailure)
        assert (outcome.unknown, "before it had read the e-mail" in outcome.error) == (True, True)
    outcome = await transport_for(program("exit 67")).send(outgoing(), large)
    assert isinstance(outcome, Permanent)


@pytest.mark.slow
async def test_a_large_email_arrives_whole(program: Callable[[str], Path], tmp_path: Path) -> None:
    data = b"Subject: x\r\n\r\n" + b"line of text\r\n" * 300_000
    transport = transport_for(program(recording(tmp_path)))
    assert await transport.send(outgoing(), RawEmail(data=data, to="ann@example.com")) == Sent()
    assert (tmp_path / "input").read_bytes() == data.replace(b"\r\n", b"\n")


@pytest.mark.slow
async def test_children_in_the_background_neither_delay_the_answer_nor_end_with_it(
    program: Callable[[str], Path], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "gate")
    child = f"(cat {tmp_path}/gate >/dev/null; echo delivered >{tmp_path}/child) &"
    transport = transport_for(program(f"cat >/dev/null\n{child}\nexit 0"), smtp_timeout_seconds=5)
    assert await transport.send(outgoing(), EMAIL) == Sent()
    outcome = await transport_for(program(f"cat >/dev/null\n{child}\necho no >&2; exit 67")).send(outgoing(), EMAIL)
    assert error_of(outcome, Permanent).endswith(": no")
    await asyncio.to_thread((tmp_path / "gate").write_text, "")
    await until((tmp_path / "child").exists)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "kind", "told"), [(0, SendFailure, "before it had read the e-mail"), (67, Permanent, "exit code 67")]
)
async def test_a_child_that_keeps_the_input_open_does_not_delay_the_answer(
    program: Callable[[str], Path], tmp_path: Path, code: int, kind: type[Any], told: str
) -> None:
    os.mkfifo(tmp_path / "gate")
    child = f"(cat {tmp_path}/gate >/dev/null; echo delivered >{tmp_path}/child) &"
    # It exits after the transport has begun to wait for the exit.
    path = program(f"exec 3<&0\n{child}\nhead -c 1 >/dev/null; exit {code}")
    large = Email(to="ann@example.com", subject="Hello", attachments=[Attachment("a", b"x" * 250_000)], text="Hi")
    outcome = await transport_for(path, smtp_timeout_seconds=5).send(outgoing(), large)
    assert told in error_of(outcome, kind)
    await asyncio.to_thread((tmp_path / "gate").write_text, "")
    await until((tmp_path / "child").exists)


@pytest.mark.slow
async def test_a_long_text_on_stderr_does_not_fail_a_program(program: Callable[[str], Path]) -> None:
    path = program("cat >/dev/null; head -c 200000 /dev/zero >&2 && exit 0; exit 75")
    assert await transport_for(path).send(outgoing(), EMAIL) == Sent()


@pytest.mark.slow
async def test_the_text_of_a_child_belongs_to_a_failed_program(
    program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sendmail, "_PIPE_SECONDS", PATIENCE_SECONDS)
    # The child writes after the exit of the program.
    child = "(while kill -0 $$ 2>/dev/null; do :; done; echo late >&2) &"
    outcome = await transport_for(program(f"cat >/dev/null\n{child}\nexit 67")).send(outgoing(), EMAIL)
    assert error_of(outcome, Permanent).endswith("exit code 67 (EX_NOUSER): late")


# --- the program itself -----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_program_that_does_not_end_is_killed_with_its_children(
    program: Callable[[str], Path], tmp_path: Path
) -> None:
    path = program(f"sleep 600 &\necho $$ $! >{tmp_path}/pids\nwait")
    outcome = await transport_for(path, smtp_timeout_seconds=0.5).send(outgoing(), EMAIL)
    assert isinstance(outcome, SendFailure)
    assert (outcome.unknown, outcome.outage) == (True, True)
    assert outcome.error == f"{path}: did not end within 0.5 s, and was killed; outcome unknown"
    await until(lambda: not any(is_running(pid) for pid in pids_in(tmp_path)))


@pytest.mark.slow
async def test_a_program_that_reads_nothing_is_killed_too(program: Callable[[str], Path]) -> None:
    large = Email(to="ann@example.com", subject="Hello", attachments=[Attachment("a", b"x" * 250_000)], text="Hi")
    transport = transport_for(program("exec sleep 600"), smtp_timeout_seconds=0.5)
    assert "did not end within" in error_of(await transport.send(outgoing(), large), SendFailure)


@pytest.mark.slow
async def test_a_cancelled_send_kills_the_program(program: Callable[[str], Path], tmp_path: Path) -> None:
    transport = transport_for(program(f"sleep 600 &\necho $$ $! >{tmp_path}/pids\nwait"))
    sending = asyncio.create_task(transport.send(outgoing(), EMAIL))
    await until(lambda: (tmp_path / "pids").exists() and len(pids_in(tmp_path)) == 2)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await until(lambda: not any(is_running(pid) for pid in pids_in(tmp_path)))


@pytest.mark.slow
async def test_a_send_that_is_cancelled_at_any_moment_leaves_no_program(
    program: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    transport = transport_for(program("exec sleep 600"))
    before, open_before = children(), open_files()
    for turns in range(30):
        sending = asyncio.create_task(transport.send(outgoing(), EMAIL))
        cancel_after(turns, sending)
        if turns % 2:
            cancel_after(turns + 1, sending)
        with pytest.raises(asyncio.CancelledError):
            await sending
    await until(lambda: children() <= before and not any("waitpid" in one.name for one in threading.enumerate()))
    await until(lambda: open_files() <= open_before)
    assert [record.message for record in caplog.records] == []


def cancel_after(turns: int, task: asyncio.Task[Outcome]) -> None:
    """Cancel the task after this number of turns of the event loop."""
    if turns == 0:
        task.cancel()
    else:
        asyncio.get_running_loop().call_soon(cancel_after, turns - 1, task)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[int]:
    """Return the running processes that this one has started."""
    return {
        int(pid)
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
        if is_running(int(pid))
    }


def pids_in(tmp_path: Path) -> list[int]:
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_a_missing_program_is_unavailable_whatever_is_sent(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "none", "No such file"), (tmp_path, "Permission denied")):
        outcome = await transport_for(path).send(outgoing(), EMAIL)
        assert isinstance(outcome, Unavailable)
        assert (outcome.outage, outcome.doubtful) == (False, None)
        assert told in outcome.error


async def test_a_process_without_free_file_descriptors_has_an_outage(program: Callable[[str], Path]) -> None:
    path = program("cat >/dev/null")
    transport = transport_for(path)
    assert await transport.send(outgoing(), EMAIL) == Sent()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        outcome = await transport.send(outgoing(), EMAIL)
    assert error_of(outcome, Unavailable) == f"{path}: Too many open files"
    assert isinstance(outcome, Unavailable)
    assert outcome.outage
    assert await transport.send(outgoing(), EMAIL) == Sent()


async def test_a_text_file_without_an_interpreter_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "sendmail"
    path.write_bytes(b"\x00\x01 not a program")
    path.chmod(0o755)
    assert error_of(await transport_for(path).send(outgoing(), EMAIL), Unavailable) == f"{path}: Exec format error"


async def test_an_email_without_a_sender_waits_for_the_setting(program: Callable[[str], Path]) -> None:
    transport = SendmailTransport(settings_with(sendmail=str(program("cat >/dev/null"))))
    outcome = await transport.send(outgoing(), EMAIL)
    assert isinstance(outcome, Unavailable)
    assert outcome.breaker in transport.part_keys(outgoing(), EMAIL)
    own = Email(to="ann@example.com", sender=SENDER, subject="Hello", text="Hi")
    assert await transport.send(outgoing(), own) == Sent()


# --- settings and doctor ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["sendmail", "./sendmail", "sendmail -t", "/usr/sbin/sendmail\n", ""])
def test_a_setting_that_is_not_a_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"PGOUTBOX_SENDMAIL=.*: (must be the absolute path|is set but empty)"):
        load_settings(sendmail=path)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"smtp_host": "mx.example.org"}, "PGOUTBOX_SMTP_HOST and PGOUTBOX_SENDMAIL are both set: unset one of them"),
        ({"mail_transport": "log"}, "but PGOUTBOX_SENDMAIL is set: unset one of them"),
    ],
)
def test_two_ways_to_send_are_refused(others: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        settings_with(sendmail="/usr/sbin/sendmail", **others)


def test_the_settings_choose_the_transport() -> None:
    assert isinstance(build("mailto", settings_with(sendmail="/usr/sbin/sendmail")), SendmailTransport)
    with pytest.raises(ConfigurationError, match="no sendmail program given: set PGOUTBOX_SENDMAIL"):
        SendmailTransport(Settings())
    with pytest.raises(ConfigurationError, match="PGOUTBOX_SMTP_SENDER: has no @"):
        transport_for("/usr/sbin/sendmail").__class__(settings_with(sendmail="/x", smtp_sender="club"))


def findings(dsn: str, path: Path) -> list[tuple[Level, str, str]]:
    settings = settings_for(dsn, sendmail=str(path), smtp_sender="club@pgoutbox.dev")
    return [(f.level, f.code, f.what) for f in examine(settings) if f.check == "smtp"]


@pytest.mark.slow
def test_the_doctor_looks_at_the_program(dsn: str, program: Callable[[str], Path], tmp_path: Path) -> None:
    path = program("exit 0")
    assert findings(dsn, path) == [(Level.OK, "transport-in-order", f"{path} is an executable program")]
    (tmp_path / "plain").write_text("x")
    ((level, code, what),) = findings(dsn, tmp_path / "plain")
    assert (level, code) == (Level.PROBLEM, "transport-unavailable")
    assert what == f"{tmp_path}/plain: this user may not execute it"
    ((level, code, what),) = findings(dsn, tmp_path / "none")
    assert (level, what) == (Level.PROBLEM, f"{tmp_path}/none: no such program")


# --- in a worker, and with real mail servers --------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_missing_program_opens_the_breaker_and_the_mail_goes_out_when_it_is_there(
    dsn: str, db: psycopg.Connection, program: Callable[[str], Path], tmp_path: Path
) -> None:
    path = program(recording(tmp_path))
    path.rename(tmp_path / "hidden")
    outbox = Outbox(settings_for(dsn, sendmail=str(path), smtp_sender=SENDER, breaker_cooldown_seconds=0.1))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text="Hi")

    message_id = enqueue(db, destination="mailto:ann@example.com")
    await Worker(outbox).run_once()
    assert db.execute("SELECT key FROM pgoutbox.breaker").fetchall() == [(f"sendmail:{path}",)]
    assert row_of(db, message_id).state == State.PENDING
    (tmp_path / "hidden").rename(path)
    db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
    db.execute("UPDATE pgoutbox.message_live SET available_at = now()")
    await Worker(outbox).run_once()
    assert row_of(db, message_id).state == State.SENT
    assert db.execute("SELECT key FROM pgoutbox.breaker").fetchall() == []


def wrapper(tmp_path: Path, command: str) -> Path:
    """Write a program that calls a mail server with its private configuration."""
    path = tmp_path / "sendmail"
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.slow
async def test_postfix_takes_the_email_with_its_envelope(tmp_path: Path) -> None:
    with running_postfix({"plain": {}}) as postfix:
        path = wrapper(tmp_path, f"{shutil.which('sendmail', path='/usr/sbin')} -C {postfix.place}/etc")
        transport = transport_for(path)
        local = f"{LOCAL_USER}@{LOCAL_DOMAIN}"
        log = postfix.place / "log"
        assert await transport.send(outgoing(), Email(to=[local, "eve@example.net"], subject="x", text="Hi")) == Sent()
        await until(lambda: log.read_text().count("status=sent") == 2)
        assert f"from=<{SENDER}>" in log.read_text()
        raw = RawEmail(data=b"Subject: x\r\n\r\nHi\r\n.\r\nBye\r\n", to=local, envelope_sender="")
        assert await transport.send(outgoing(), raw) == Sent()
        await until(lambda: log.read_text().count("status=sent") == 3)
        assert "from=<>" in log.read_text()
        (tmp_path / "main.cf").write_text("inet_protocols = none\n")
        wrapper(tmp_path, f"{shutil.which('sendmail', path='/usr/sbin')} -C {tmp_path}")
        outcome = await transport.send(outgoing(), EMAIL)
        assert "exit code 75 (EX_TEMPFAIL): sendmail: fatal: " in error_of(outcome, SendFailure)


@pytest.mark.slow
async def test_exim_takes_the_email_with_its_envelope(tmp_path: Path) -> None:
    with running_exim() as exim:
        path = wrapper(tmp_path, f"{shutil.which('exim4', path='/usr/sbin:/usr/local/sbin')} -C {exim.place}/conf")
        transport = transport_for(path)
        log = exim.place / "log-main"
        assert await transport.send(outgoing(), EMAIL) == Sent()
        await until(lambda: log.exists() and "=> ann" in log.read_text())
        assert f"<= {SENDER}" in log.read_text()
        raw = RawEmail(data=b"Subject: x\r\n\r\nHi\r\n.\r\nBye\r\n", to="ann@example.com", envelope_sender="")
        assert await transport.send(outgoing(), raw) == Sent()
        await until(lambda: log.read_text().count("=> ann") == 2)
        assert "<= <>" in log.read_text()
