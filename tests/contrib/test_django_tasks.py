"""Tests the backend of `django.tasks` in a real project with a real worker process.

`BEFORE` and `AFTER` are the behaviours of Django's own tests (tests/tasks of its source), each under the name that it
has there. `BEFORE` runs when the tasks are enqueued, and `AFTER` when a worker has run them.
"""

from __future__ import annotations

import asyncio
import signal
import textwrap
from typing import Any, Final

import django
import psycopg
import pytest

from pgoutbox.encryption import SEALED
from tests.support.django_project import Project
from tests.support.pages import DOCS, blocks_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MODULE: Final = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
BACKEND: Final = "pgoutbox.contrib.django.tasks.OutboxBackend"
KEY: Final = "MTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTI="
HEAD: Final = f"""
import asyncio, dataclasses, datetime, importlib, io, json, logging, os, pathlib, pickle, types
from django.core.management import call_command
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.test import override_settings
from django.utils import timezone
from {MODULE} import TaskResultStatus, default_task_backend, task, task_backends
from {MODULE}.exceptions import *
from {MODULE}.signals import task_enqueued, task_finished, task_started
from {MODULE} import exceptions
from pgoutbox.errors import ArgumentError
InvalidTask = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError
"""
TASKS: Final = f"""
{HEAD}

def note(text):
    with open("notes.txt", "a") as file:
        file.write(text + "\\n")

@task()
def noop(*args, **kwargs):
    note("noop " + " ".join(map(str, args)))

@task
def bare():
    return None

@task()
async def noop_async(*args, **kwargs):
    return None

@task(priority=10)
def answer():
    return 42

@task()
def value_error():
    raise ValueError("This task failed")

@task()
def system_exit():
    raise SystemExit("This task exits")

@task()
def keyboard_interrupt():
    raise KeyboardInterrupt("This task is interrupted")

@task()
def complex_exception():
    raise ValueError(ValueError("This task failed"))

@task()
def complex_return_value():
    return lambda: True

@task()
def refused_return_value():
    return "\\x00"

@task(takes_context=True)
def own_id(context):
    return context.task_result.id

@task(takes_context=True)
def attempt_of(context):
    return context.attempt

@task()
def broken_connection():
    connection.cursor().execute("SELECT pg_terminate_backend(pg_backend_pid())")

@task()
def left_connection():
    transaction.set_autocommit(False)
    connection.cursor().execute("SELECT 1")
    return "done"

@task()
def left_atomic():
    transaction.atomic().__enter__()
    connection.cursor().execute("SELECT 1")
    return "left"

@task(takes_context=True)
def third_time(context):
    note(f"attempt {{context.attempt}} with {{len(context.task_result.errors)}} errors")
    if context.attempt < 3:
        raise ValueError(f"not yet: {{context.attempt}}")
    return "at last"

@task(takes_context=True)
def exits(context):
    if context.attempt == 1:
        os._exit(1)
    return "survived"

def noted(sender, task_result, **_):
    if sender.__name__ == "OutboxBackend":
        note(f"signal {{task_result.status}} {{task_result.task.name}}")

for signal in (task_enqueued, task_started, task_finished):
    signal.connect(noted)
"""
RAISES: Final = """
def raises(kind, text, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{kind.__name__} expected")
"""
BEFORE: Final = f"""
{HEAD}
{RAISES}
from members import tasks as t
from pgoutbox.contrib.django.tasks import OutboxBackend

def test_using_correct_backend():
    assert default_task_backend == task_backends["default"] and isinstance(task_backends["default"], OutboxBackend)
    assert default_task_backend.alias == "default" and default_task_backend.options == {{}}

def test_task_decorator():
    assert all(type(one).__name__ == "Task" for one in (t.noop, t.bare, t.noop_async))

def test_enqueue_task():
    for one in (t.noop, t.noop_async):
        result = one.enqueue(1, two=(3, b"4"))
        assert result.status == TaskResultStatus.READY and not result.is_finished
        assert (result.task, result.args, result.kwargs) == (one, [1], {{"two": [3, "4"]}})
        assert result.enqueued_at and not (result.started_at or result.last_attempted_at or result.finished_at)
        assert result.attempts == 0 and result.worker_ids == []
        raises(ValueError, "Task has not finished yet", lambda: result.return_value)

def test_enqueue_task_async():
    result = asyncio.run(t.noop.aenqueue())
    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [], {{}})

def test_enqueue_with_invalid_argument():
    raises(TypeError, "Unsupported type", t.noop.enqueue, datetime.datetime.now())
    raises(TypeError, "Unsupported type", asyncio.run, t.noop.aenqueue(datetime.datetime.now()))

def test_using():
    now = timezone.now()
    changed = t.noop.using(run_after=now).using(priority=10).using(queue_name="mail")
    assert (changed.priority, changed.queue_name, changed.run_after) == (10, "mail", now)
    assert (t.noop.priority, t.noop.queue_name, t.noop.run_after) == (0, "default", None)
    assert t.noop.using() == t.noop and t.noop.using() is not t.noop

def test_using_unknown_or_missing_backend():
    raises(ImproperlyConfigured, "The connection 'unknown' doesn't exist.", t.noop.using, backend="unknown")
    with override_settings(TASKS={{"missing": {{"BACKEND": "does.not.exist"}}}}):
        raises(ImproperlyConfigured, "Could not find backend 'does.not.exist'", t.noop.using, backend="missing")

def test_refresh_result():
    result = t.noop.enqueue()
    before = dataclasses.asdict(result)
    result.refresh()
    assert dataclasses.asdict(result) == before
    asyncio.run(result.arefresh())
    assert dataclasses.asdict(result) == before

def test_naive_datetime():
    raises(InvalidTask, "run_after must be an aware datetime.", t.noop.using, run_after=datetime.datetime.now())

def test_invalid_priority():
    for priority in (-101, 101, 3.1):
        raises(InvalidTask, "priority must be a whole number between -100 and 100.", t.noop.using, priority=priority)
    for priority in (100, -100, 0):
        t.noop.using(priority=priority)

def test_unknown_queue_name():
    raises(InvalidTask, "Queue 'queue-2' is not valid for backend.", t.noop.using, queue_name="queue-2")
    assert t.noop.using(queue_name="Any name", backend="any").queue_name == "Any name"

def test_call_task():
    assert t.answer.call() == 42 and t.noop_async.call() is None
    assert asyncio.run(t.answer.acall()) == 42 and asyncio.run(t.noop_async.acall()) is None

def test_get_result():
    result = t.noop.using(run_after=timezone.now() + datetime.timedelta(days=1), priority=-5).enqueue(1)
    assert t.noop.get_result(result.id) == result
    assert asyncio.run(t.noop.aget_result(result.id)) == result

def test_get_missing_result():
    for result_id in ("12345", "0", "-1", "x", "", "1.5", "9" * 30, "²"):
        raises(TaskResultDoesNotExist, result_id, t.noop.get_result, result_id)
    raises(TaskResultDoesNotExist, "12345", asyncio.run, t.noop.aget_result("12345"))

def test_get_incorrect_result():
    result = t.noop_async.enqueue()
    raises(TaskResultMismatch, "Task does not match", t.noop.get_result, result.id)
    raises(TaskResultMismatch, "Task does not match", asyncio.run, t.noop.aget_result(result.id))

def test_invalid_function():
    for function in (any, lambda: None, test_invalid_function.__str__):
        raises(InvalidTask, "Task function must be defined at a module level.", task(), function)

def test_get_backend_and_names():
    assert isinstance(t.noop.get_backend(), OutboxBackend) and t.noop.name == "noop"
    assert t.noop.module_path == "members.tasks.noop"

def test_pickle_task_result():
    result = t.noop.enqueue()
    if hasattr(t.noop, "_reconstruct"):  # Since Django 6.1.
        assert pickle.loads(pickle.dumps(t.noop)) == t.noop
        assert pickle.loads(pickle.dumps(result)) == result

def test_no_backends():
    with override_settings(TASKS={{}}):
        raises(ImproperlyConfigured, "doesn't exist", t.noop.enqueue)

def test_takes_context_without_taking_context():
    raises(InvalidTask, "does not have a first argument of 'context'", task(takes_context=True), t.answer.func)

def test_run_after_in_decorator():
    raises(TypeError, "run_after", lambda: task(run_after=timezone.now())(t.answer.func))

def test_enqueue_logs():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("{MODULE}")
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    result = t.noop.enqueue()
    (record,) = records
    assert "enqueued" in record.getMessage() and result.id in record.getMessage()

def test_validate_on_enqueue():
    changed = t.noop.using(queue_name="mail")
    with override_settings(TASKS={{"default": {{"BACKEND": "{BACKEND}", "QUEUES": ["queue-1"]}}}}):
        raises(InvalidTask, "Queue 'mail' is not valid for backend", changed.enqueue)
        raises(InvalidTask, "Queue 'mail' is not valid for backend", asyncio.run, changed.aenqueue())

def test_doesnt_wait_until_transaction_commit_by_default():
    with transaction.atomic():
        result = t.noop.enqueue()
        assert result.enqueued_at and t.noop.get_result(result.id) == result

def test_options():
    for option, value in (("MAX_ATTEMPTS", 0), ("MAX_ATTEMPTS", "3"), ("MAX_TRIES", 3)):
        backend = {{"BACKEND": "{BACKEND}", "OPTIONS": {{option: value}}}}
        with override_settings(TASKS={{"default": backend}}):
            raises(ImproperlyConfigured, f"TASKS['default']['OPTIONS']['{{option}}']", t.noop.using)
    for queue in ("Mail", "a" * 60, ""):
        with override_settings(TASKS={{"default": {{"BACKEND": "{BACKEND}", "QUEUES": [queue]}}}}):
            raises(ImproperlyConfigured, "TASKS['default']['QUEUES']", t.noop.using)

for name, case in list(globals().items()):
    if name.startswith("test_"):
        case()

def fails():
    with transaction.atomic():
        t.noop.enqueue("rolled-back")
        raise RuntimeError("rolled back")

for priority, count in ((-1, 12), (0, 4), (10, 3)):
    for _ in range(count):
        t.noop.using(priority=priority, queue_name="mail").enqueue("mail", priority)
t.noop.using(priority=10, queue_name="Any name", backend="any").enqueue("any-queue")
raises(RuntimeError, "rolled back", fails)
with transaction.atomic():
    raises(ArgumentError, "NUL", t.noop.enqueue, "\\0")
    t.noop.enqueue("after-refusal")
later = t.noop.using(run_after=timezone.now() + datetime.timedelta(days=1)).enqueue("later")
results = {{
    one.name: one.enqueue().id
    for one in (
        t.left_atomic, t.answer, t.noop, t.noop_async, t.value_error, t.system_exit, t.keyboard_interrupt,
        t.complex_exception, t.complex_return_value, t.refused_return_value, t.own_id, t.attempt_of, t.left_connection,
        t.broken_connection,
    )
}}
pathlib.Path("results.txt").write_text(repr((later.id, results)))
"""
AFTER: Final = f"""
{HEAD}
{RAISES}
from members import tasks as t

from pgoutbox.contrib.django import outbox

later, ids = eval(pathlib.Path("results.txt").read_text())
results = {{name: getattr(t, name).get_result(one) for name, one in ids.items()}}

def test_result():
    values = {{"answer": 42, "noop": None, "noop_async": None, "left_connection": "done", "left_atomic": "left"}}
    for name, value in values.items():
        result = results[name]
        assert result.status == TaskResultStatus.SUCCESSFUL and result.is_finished and result.errors == []
        assert result.return_value == value and result.attempts == 1 and result.worker_ids
        assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at

def test_catches_exception():
    for name, kind, text in (
        ("value_error", ValueError, "ValueError: This task failed"),
        ("system_exit", SystemExit, "SystemExit: This task exits"),
        ("keyboard_interrupt", KeyboardInterrupt, "KeyboardInterrupt: This task is interrupted"),
    ):
        result = results[name]
        assert result.status == TaskResultStatus.FAILED and result.is_finished and result.attempts == 1
        raises(ValueError, "Task failed", lambda: result.return_value)
        (error,) = result.errors
        assert error.exception_class is kind and error.traceback.endswith(text + "\\n")
        assert result.enqueued_at <= result.started_at <= result.finished_at
        assert (result.task, result.args, result.kwargs) == (getattr(t, name), [], {{}})

def test_complex_exception():
    (error,) = results["complex_exception"].errors
    assert error.exception_class is ValueError and 'ValueError(ValueError("This task failed"))' in error.traceback

def test_complex_return_value():
    result = results["complex_return_value"]
    assert result.status == TaskResultStatus.FAILED and result._return_value is None
    assert result.errors[0].exception_class is TypeError and "Unsupported type" in result.errors[0].traceback
    result = results["refused_return_value"]
    assert result.status == TaskResultStatus.FAILED and "return_value" in result.errors[0].traceback

def test_takes_context():
    assert results["own_id"].return_value == results["own_id"].id
    assert results["attempt_of"].return_value == 1

def test_task_error():
    error = results["value_error"].errors[0]
    object.__setattr__(error, "exception_class_path", "subprocess.run")
    raises(ValueError, "'subprocess.run' does not reference a valid exception.", lambda: error.exception_class)
    object.__setattr__(error, "exception_class_path", "does.not.exist")
    raises(ImportError, "", lambda: error.exception_class)

def test_broken_connection():
    assert results["broken_connection"].errors[0].exception_class.__name__ == "OperationalError"

def test_removed_queue():
    result = t.noop.using(queue_name="mail").enqueue()
    with override_settings(TASKS={{"default": {{"BACKEND": "{BACKEND}"}}}}):
        assert task_backends["default"].get_result(result.id).task.queue_name == "mail"

def test_dumpdata():
    dumped = io.StringIO()
    call_command("dumpdata", stdout=dumped)
    assert '"model": "auth.permission"' in dumped.getvalue() and '"model": "pgoutbox.' not in dumped.getvalue()

def test_run_after():
    assert t.noop.get_result(later).status == TaskResultStatus.READY

def ends(state, **values):
    result = t.noop.enqueue()
    columns = ", ".join(f"{{name}} = '{{value}}'" for name, value in values.items())
    connection.cursor().execute(
        f"UPDATE pgoutbox.message SET state = '{{state}}', finished_at = now(), {{columns}} WHERE id = {{result.id}}"
    )
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    return result.errors[-1].traceback

def test_other_ends():
    assert ends("cancelled", owner="x") == "cancelled\\n"
    assert ends("skipped", skip_reason="expired") == "skipped: expired\\n"
    assert ends("failed", attempt_count=1) == "failed\\n"

def test_other_topic():
    with transaction.atomic():
        other = outbox.on(connection).enqueue("mail.welcome", {{}})
    raises(TaskResultDoesNotExist, "", default_task_backend.get_result, str(other.id))

def store(result, attempt_count, value):
    object.__setattr__(result, "_return_value", value)
    with connection.cursor() as cursor:
        cursor.execute("SELECT created_at FROM pgoutbox.message WHERE id = %s", [result.id])
        token = {{"id": int(result.id), "created_at": cursor.fetchone()[0], "attempt_count": attempt_count}}
        default_task_backend._store(types.SimpleNamespace(**token), result)
        cursor.execute("SELECT content->>'return_value' FROM pgoutbox_task_result WHERE message_id = %s", [result.id])
        return cursor.fetchone()[0]

def test_fence():
    result = t.noop.enqueue()
    assert [store(result, *one) for one in ((1, "a"), (3, "c"), (2, "b"), (3, "d"))] == ["a", "c", "c", "c"]

def test_result_of_another_time():
    result = t.noop.enqueue()
    stale = json.dumps({{"return_value": "stale", "errors": [["builtins.ValueError", "stale"]]}})
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO pgoutbox_task_result VALUES (%s, '2000-01-01', 9, %s)", [result.id, stale])
    result.refresh()
    assert result.errors == [] and store(result, 1, "new") == "new"

def test_retention():
    result = t.noop.enqueue()
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pgoutbox_task_result")
        count = cursor.fetchone()[0]
        # Results of deleted messages, right after the id from which the writes look.
        left_behind = "SELECT *, now(), 1, '{{}}' FROM generate_series(10000001, 10000025)"
        cursor.execute(f"INSERT INTO pgoutbox_task_result {{left_behind}}")
        left = []
        for attempt_count in (1, 2, 3):
            values = {{"id": int(result.id), "created_at": timezone.now(), "attempt_count": attempt_count}}
            values |= {{"content": "{{}}", "after_id": 10_000_000}}
            cursor.execute(importlib.import_module("pgoutbox.contrib.django.tasks")._WRITE, values)
            cursor.execute("SELECT count(*) FROM pgoutbox_task_result")
            left.append(cursor.fetchone()[0] - count - 1)
    assert left == [5, 0, 0], left

def test_serializable_by_default():
    is_read_committed = "current_setting('transaction_isolation') = 'read committed'"
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE pgoutbox_task_result ADD CHECK ({{is_read_committed}}) NOT VALID")
        cursor.execute("SET default_transaction_isolation = 'serializable'")
    assert store(t.noop.enqueue(), 1, "stored") == "stored"

for name, case in list(globals().items()):
    if name.startswith("test_"):
        case()
"""

SCHEDULES: Final = """
from pgoutbox import Every
from members import tasks

outbox.schedule_task(tasks.noop, Every(minutes=1), args=["tick"], kwargs={"secret": "s3cret"}, missed="all")
outbox.schedule_task(tasks.own_id.using(queue_name="mail", priority=5), "0 7 * * mon-fri", name="mail-id")
"""
WRONG_SCHEDULES: Final = f"""
{HEAD}
{RAISES}
from members import tasks as t
from pgoutbox.contrib.django import outbox
from pgoutbox.errors import ConfigurationError

schedule = outbox.schedule_task
raises(ConfigurationError, "'members.tasks.answer': too many positional", schedule, t.answer, "0 7 * * *", args=[1])
raises(ConfigurationError, "must get a task of Django", schedule, raises, "0 7 * * *")
raises(ConfigurationError, "args: must be a list or a tuple", schedule, t.noop, "0 7 * * *", args="news")
raises(ConfigurationError, "Unsupported type", schedule, t.noop, "0 7 * * *", args=[object()])
raises(ConfigurationError, "schedule 'seven': rule", schedule, t.noop, "seven", name="seven")
with override_settings(TASKS={{"default": {{"BACKEND": "{MODULE}.backends.dummy.DummyBackend"}}}}):
    raises(ConfigurationError, "the backend 'default' must be OutboxBackend", schedule, t.noop, "0 7 * * *")
"""


@pytest.fixture
def tasks(project: Project) -> Project:
    """Return a project with tasks."""
    names: dict[str, dict[str, Any]] = {
        "default": {"QUEUES": ["default", "mail"]},
        "any": {"QUEUES": []},
        "thrice": {"OPTIONS": {"MAX_ATTEMPTS": 3}},
        "once": {"OPTIONS": {"MAX_ATTEMPTS": 1}},
    }
    project.set(TASKS={name: {"BACKEND": BACKEND, **given} for name, given in names.items()})
    (project.directory / "members" / "tasks.py").write_text(TASKS)
    return project


def notes(project: Project) -> list[str]:
    return (project.directory / "notes.txt").read_text().splitlines()


async def test_the_behaviours_that_django_tests(tasks: Project) -> None:
    assert "No changes" in await tasks.manage("makemigrations", "--check")
    await tasks.run(BEFORE)
    log = await tasks.manage("pgoutbox", "worker", "--once", "--concurrency", "1")
    assert 'raise ValueError("This task failed")' in log
    assert "NoneType: None" not in log
    assert "a handler left a transaction of DATABASES['default'] open" in log
    await tasks.run(AFTER)
    done = notes(tasks)
    assert not [note for note in done if "rolled-back" in note or "later" in note]
    assert {"noop any-queue", "noop after-refusal"} <= set(done)
    # The tasks of one queue, whose oldest ones have the lowest priority.
    mail = [note.removeprefix("noop mail ") for note in done if note.startswith("noop mail")]
    assert len(mail) == 19
    assert mail[:3] == ["10"] * 3
    assert mail[-7:] == ["-1"] * 7
    signals = [note.removeprefix("signal ") for note in done if note.startswith("signal") and "answer" in note]
    assert signals == ["READY answer", "RUNNING answer", "SUCCESSFUL answer"]
    assert "signal FAILED value_error" in done


async def test_retries_crashes_and_unknown_tasks(tasks: Project) -> None:
    tasks.set(PGOUTBOX={"ENCRYPTION_KEYS": KEY})
    enqueue = """
        from members import tasks as t
        import datetime
        from django.utils import timezone
        later = timezone.now() + datetime.timedelta(days=1)
        print(t.third_time.using(backend="thrice", run_after=later).enqueue().id, t.exits.enqueue().id, end=" ")
        print(t.exits.using(backend="once").enqueue().id, t.answer.using(run_after=later).enqueue().id)
    """
    ids = [int(word) for word in (await tasks.run(textwrap.dedent(enqueue))).split()]
    with psycopg.connect(tasks.dsn, autocommit=True) as connection:
        assert connection.execute("SELECT bool_and(payload ? %s) FROM pgoutbox.message", [SEALED]).fetchone() == (True,)
        # A release that does not know the task any more.
        (tasks.directory / "members" / "tasks.py").write_text(TASKS.replace("def answer", "def renamed"))
        await tasks.manage("pgoutbox", "worker", "--once", code=1)
        connection.execute("UPDATE pgoutbox.claim SET lease_expires_at = now() - interval '1 s'")
        connection.execute("SELECT pgoutbox.reschedule(%s)", [ids])
        worker = tasks.start("pgoutbox", "worker")
        expected = ["failed", "pending", "sent", "sent"]
        try:
            await asyncio.to_thread(wait_until, lambda: _hurry(connection) == expected, lambda: str(_hurry(connection)))
        finally:
            worker.send_signal(signal.SIGTERM)
            await asyncio.to_thread(worker.wait)
        (sealed,) = (
            connection.execute("SELECT bool_and(content ? %s) FROM pgoutbox_task_result", [SEALED]).fetchone() or ()
        )
        assert sealed
        row = connection.execute(
            "SELECT attempt_count < max_attempts, last_error FROM pgoutbox.message WHERE id = %s", ids[3:]
        )
        has_attempts_left, error = row.fetchone() or ()
        assert has_attempts_left
        assert "the task cannot be loaded: ImportError" in error
    assert [note for note in notes(tasks) if note.startswith("attempt")] == [
        "attempt 1 with 0 errors",
        "attempt 2 with 1 errors",
        "attempt 3 with 2 errors",
    ]
    read = f"""
        from members import tasks as t
        third, survivor, lost = [one.get_result(str(id)) for one, id in zip((t.third_time, t.exits, t.exits), {ids})]
        print(third.return_value, third.attempts, [error.traceback.splitlines()[-1] for error in third.errors])
        print(survivor.return_value, survivor.attempts, len(set(survivor.worker_ids)))
        print(lost.status, lost.attempts, lost.errors)
    """
    lines = (await tasks.run(textwrap.dedent(read))).splitlines()
    assert lines[0] == "at last 3 ['ValueError: not yet: 1', 'ValueError: not yet: 2']"
    assert lines[1] == "survived 2 2"
    assert lines[2].startswith("FAILED 1 [TaskError(exception_class_path='pgoutbox.message.Permanent'")


@pytest.mark.parametrize("settings", [{}, {"ENCRYPTION_KEYS": KEY}], ids=["plain", "encrypted"])
async def test_a_task_runs_at_each_time_of_its_schedule(tasks: Project, settings: dict[str, str]) -> None:
    tasks.set(PGOUTBOX=settings, TIME_ZONE="Europe/Berlin")
    with (tasks.directory / "members" / "outbox.py").open("a") as file:
        file.write(SCHEDULES)
    await tasks.manage("pgoutbox", "worker", "--once")
    with psycopg.connect(tasks.dsn, autocommit=True) as connection:
        known = connection.execute("SELECT name, timezone, message ->> 'queue' FROM pgoutbox.schedule ORDER BY name")
        assert known.fetchall() == [
            ("mail-id", "Europe/Berlin", "mail.high"),
            ("members.tasks.noop", "Europe/Berlin", "default"),
        ]
        connection.execute("UPDATE pgoutbox.schedule SET next_at = date_trunc('minute', now()) - interval '5 minutes'")
        connection.execute("SELECT pgoutbox.enqueue('django.schedule', '{}', headers => '{\"schedule\": \"gone\"}')")
        await tasks.manage("pgoutbox", "worker", "--once")
        await tasks.manage("pgoutbox", "worker", "--once")  # A run may leave the tasks that it has enqueued.
        found = connection.execute(
            "SELECT topic, state, count(*), max(last_error) FROM pgoutbox.message GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall()
        rows = connection.execute("SELECT to_jsonb(m)::text FROM pgoutbox.message AS m").fetchall()
    waits, ticks, done = found
    assert waits == ("django.schedule", "pending", 1, "this process has no schedule 'gone'")
    assert (ticks[:2], done[:2]) == (("django.schedule", "sent"), ("django.task", "sent"))
    assert ticks[2] == done[2] >= 6
    assert notes(tasks).count("noop tick") == done[2] - notes(tasks).count("signal SUCCESSFUL own_id")
    assert any("s3cret" in text for (text,) in rows) == (not settings)
    await tasks.run(WRONG_SCHEDULES)


async def test_migrate_to_zero_keeps_results_until_somebody_deletes_them(tasks: Project) -> None:
    (number,) = (await tasks.run("from members import tasks as t; print(t.answer.enqueue().id)")).split()
    await tasks.manage("pgoutbox", "worker", "--once")
    assert "1 results of tasks would be deleted" in await tasks.manage("migrate", "pgoutbox", "zero", code=1)
    read = f"""
        from members import tasks as t
        from pgoutbox.contrib.django.tasks import TaskResultDoesNotExist
        try:
            print(t.answer.get_result("{number}").status)
        except TaskResultDoesNotExist:
            print("gone")
    """
    assert await tasks.run(textwrap.dedent(read)) == "SUCCESSFUL\n"
    removal = blocks_of(DOCS / "how-to/django.md", "sh")[-1].text
    *before, last = removal.splitlines()
    await tasks.type("\n".join(before))
    await tasks.manage("migrate", "-v0")
    assert await tasks.run(textwrap.dedent(read)) == "gone\n"
    await tasks.manage("migrate", "pgoutbox", "zero")
    await tasks.manage(*last.split()[2:], "--yes")
    with psycopg.connect(tasks.dsn) as connection:
        names = connection.execute(
            "SELECT relname FROM pg_class WHERE relname LIKE '%task_result' OR relname = 'message'"
        )
        assert names.fetchall() == []


def _hurry(connection: psycopg.Connection) -> list[str]:
    """Make retries due, and return the states."""
    connection.execute(
        "SELECT pgoutbox.reschedule(array_agg(id)) FROM pgoutbox.message WHERE state = 'pending' AND attempt_count > 0"
    )
    rows = connection.execute("SELECT state FROM pgoutbox.message WHERE topic = 'django.task' ORDER BY state")
    return [state for (state,) in rows.fetchall()]
