"""Tasks of Django through the outbox: the backend enqueues in the caller's transaction, and a worker runs the task.

A task is a message of the topic `django.task`, and its result has the id of the message. Status, times and workers come
from the message. The table of `models.StoredResult` has the return value and the errors. They are written before the
message is finished, so that a successful task always has its value.
"""

from __future__ import annotations

import copy
import inspect
import json
import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final

import django
import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils import timezone
from django.utils.module_loading import import_string

from pgoutbox.contrib.django import conf, outbox
from pgoutbox.encryption import Identity, is_sealed, keyring_of, unseal
from pgoutbox.enqueue.payloads import to_json
from pgoutbox.errors import ArgumentError
from pgoutbox.handlers import SyncContext
from pgoutbox.message import Message, Outcome, Unavailable
from pgoutbox.options import check_max_attempts, check_name
from pgoutbox.topics import Topic
from pgoutbox.worker.handler_errors import outcome_of_exception, traceback_of
from pgoutbox.worker.transactional.django_orm import close_left

if django.VERSION >= (6, 0):
    from django.tasks import Task, TaskContext, TaskResult, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskError
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
else:  # The backport.
    from django_tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskError
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

TOPIC: Final = "django.task"
MAX_ATTEMPTS: Final = "MAX_ATTEMPTS"
# The queues of one queue of Django, and how often a worker asks each of them first.
_WEIGHTS: Final = {".high": 16, "": 4, ".low": 1}
_STATUSES: Final = {
    "pending": TaskResultStatus.READY,
    "sending": TaskResultStatus.RUNNING,
    "sent": TaskResultStatus.SUCCESSFUL,
}

# Attempts that use up none of the message's attempts do not count: postponed ones, and those released without a slot.
_READ: Final = """
SELECT
    m.payload::text, m.state, m.attempt_count, m.finished_at, m.skip_reason,
    a.workers, a.started_at, a.last_started_at, a.errors, r.attempt_count, r.content::text
FROM pgoutbox.message AS m
LEFT JOIN pgoutbox_task_result AS r ON r.message_id = m.id AND r.created_at = m.created_at
CROSS JOIN LATERAL (
    SELECT
        array_agg(b.worker ORDER BY b.attempt_count) AS workers,
        min(b.started_at) AS started_at,
        max(b.started_at) AS last_started_at,
        array_agg(b.error ORDER BY b.attempt_count) AS errors
    FROM (
        SELECT v.attempt_count, v.worker, v.started_at, v.error
        FROM pgoutbox.attempt_view AS v
        WHERE v.message_id = m.id AND v.outcome NOT IN ('snoozed', 'released')
        UNION ALL
        SELECT m.attempt_count, m.worker, m.claimed_at, NULL WHERE m.state = 'sending'
    ) AS b
) AS a
WHERE m.id = %(id)s AND m.topic = %(topic)s
"""
# The fence: an attempt never overwrites what a later one has written. A row of a restored table counts as earlier.
# Each write also removes results whose messages retention has deleted, among the next 20 after a random id. So a result
# outlives its message by about a twentieth of its life.
_WRITE: Final = """
WITH gone AS (
    DELETE FROM pgoutbox_task_result AS r
    USING (
        SELECT s.message_id
        FROM pgoutbox_task_result AS s
        WHERE s.message_id > %(after_id)s
        ORDER BY s.message_id
        LIMIT 20
        FOR UPDATE SKIP LOCKED
    ) AS near
    WHERE r.message_id = near.message_id
        AND r.message_id <> %(id)s
        AND NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.id = r.message_id)
)
INSERT INTO pgoutbox_task_result AS r (message_id, created_at, attempt_count, content)
VALUES (%(id)s, %(created_at)s, %(attempt_count)s, %(content)s::jsonb)
ON CONFLICT (message_id) DO UPDATE
SET created_at = excluded.created_at, attempt_count = excluded.attempt_count, content = excluded.content
WHERE (r.created_at, r.attempt_count) < (excluded.created_at, excluded.attempt_count)
"""


class OutboxBackend(BaseTaskBackend):
    """Enqueue each task as a message: in the caller's transaction, and outside of one it commits at once.

    An exception of the task is final, unless OPTIONS["MAX_ATTEMPTS"] grants more attempts. An attempt whose worker died
    is repeated. With QUEUES = [] all tasks are in the queue `default` of pgoutbox.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True
    option_names: frozenset[str] = frozenset({MAX_ATTEMPTS})
    scheduled: ClassVar = dict[str, tuple[Task, tuple[Any, ...], dict[str, Any]]]()
    """The tasks of schedules by the names of these, with their arguments."""

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        place = f"TASKS[{alias!r}]"
        for name in self.options.keys() - self.option_names:
            raise ImproperlyConfigured(f"{place}['OPTIONS'][{name!r}]: unknown option; known: {MAX_ATTEMPTS}")
        try:
            if MAX_ATTEMPTS in self.options:
                check_max_attempts(f"['OPTIONS'][{MAX_ATTEMPTS!r}]", self.options[MAX_ATTEMPTS])
            for name in self.queues:
                check_name("['QUEUES']", name)
                check_name("['QUEUES']", f"{name}.high")
        except ArgumentError as error:
            raise ImproperlyConfigured(f"{place}{error}") from None

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Write the message. Raises `TypeError` for arguments that are not JSON."""
        connection = connections[conf.alias()]
        with conf.transaction_of(connection):
            result = self._write(connection, task, args, kwargs)
        task_enqueued.send(type(self), task_result=result)
        return result

    def enqueue_in(
        self,
        connection: psycopg.Connection[Any],
        task: Task,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Write the message in the transaction of this connection."""
        task_enqueued.send(type(self), task_result=self._write(connection, task, args, kwargs))

    def queue_of_call(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the queue of a task that will be called so. Raises `TypeError` for wrong arguments."""
        normalize_json([args, kwargs])
        inspect.signature(task.func).bind(*(None,) * task.takes_context, *args, **kwargs)
        return self._queue_of(task)

    def _queue_of(self, task: Task) -> str:
        lane = ".high" if task.priority > 0 else ".low" if task.priority < 0 else ""
        return f"{task.queue_name if self.queues else 'default'}{lane}"

    def _write(
        self,
        connection: Any,  # noqa: ANN401 - Django has no types
        task: Task,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> TaskResult:
        self.validate_task(task)
        payload = {
            "task": task.module_path,
            "args": normalize_json(args),
            "kwargs": normalize_json(kwargs),
            "queue": task.queue_name,
            "priority": int(task.priority),
            "backend": self.alias,
            "run_after": task.run_after and task.run_after.isoformat(),
            "enqueued_at": timezone.now().isoformat(),
        }
        due = task.run_after
        if due is not None and timezone.is_naive(due):
            due = timezone.make_aware(due)
        enqueued = outbox.on(connection).enqueue(
            TOPIC,
            payload,
            queue=self._queue_of(task),
            available_at=due,
            max_attempts=self.options.get(MAX_ATTEMPTS),
        )
        return _result_of(task, payload, id=str(enqueued.id), status=TaskResultStatus.READY)

    def get_result(self, result_id: str) -> TaskResult:
        """Return the result as the database has it. Raises `TaskResultDoesNotExist` without a task, or its value."""
        row = None
        if str(result_id).isdecimal() and len(str(result_id)) <= 18:
            with connections[conf.alias()].cursor() as cursor:
                cursor.execute(_READ, {"id": int(result_id), "topic": TOPIC})
                row = cursor.fetchone()
        if row is None:
            raise TaskResultDoesNotExist(result_id)
        text, state, count, finished_at, skip_reason, workers, started_at, last_at, errors, stored_count, content = row
        if state == "sent" and content is None:  # The table was lost: a worker stores the value first.
            raise TaskResultDoesNotExist(result_id)
        payload = _opened(text, Identity("payload", TOPIC))
        stored = _opened(content or '{"return_value": null, "errors": []}', Identity("content", TOPIC, str(result_id)))
        times = {"started_at": started_at, "last_attempted_at": last_at, "finished_at": finished_at}
        status = _STATUSES.get(state, TaskResultStatus.FAILED)
        result = _result_of(_task_of(payload), payload, id=str(result_id), status=status, **times)
        result.worker_ids.extend(workers or ())
        result.errors.extend(TaskError(exception_class_path=path, traceback=trace) for path, trace in stored["errors"])
        if state not in _STATUSES and (state != "failed" or stored_count != count):
            # The task itself did not say why.
            reason = ": ".join(filter(None, (state, skip_reason or (errors and errors[-1]))))
            kind = "Permanent" if state == "failed" else "Skip"
            result.errors.append(TaskError(exception_class_path=f"pgoutbox.message.{kind}", traceback=f"{reason}\n"))
        if state == "sent":
            _set(result, _return_value=stored["return_value"])
        return result

    def run(self, message: Message[Any], result: TaskResult) -> Outcome | None:
        """Run the task of a message, and store its return value or its error."""
        task, settings, error = result.task, outbox.settings, None
        in_transaction = connections[conf.alias()].in_atomic_block  # That of a test.
        task_started.send_robust(type(self), task_result=result)
        try:
            context = (TaskContext(task_result=result),) if task.takes_context else ()
            try:
                value = normalize_json(task.call(*context, *result.args, **result.kwargs))
            finally:
                if not in_transaction:
                    close_left(connections[conf.alias()])  # The result is stored whatever the task has left.
            to_json(value, max_bytes=settings.max_payload_bytes, field="return_value")
            _set(result, _return_value=value)
        except BaseException as raised:  # noqa: BLE001 - a task may exit
            error = raised
            trace = traceback_of(error, with_texts=settings.error_texts).replace("\0", "\\x00")
            path = f"{type(error).__module__}.{type(error).__qualname__}"
            result.errors.append(TaskError(exception_class_path=path, traceback=f"{trace}\n"))
            if settings.error_texts:
                return self._end(message, result, error)  # Receivers of the signal log the exception in hand.
        return self._end(message, result, error)

    def _end(self, message: Message[Any], result: TaskResult, error: BaseException | None) -> Outcome | None:
        self._store(message, result)
        is_final = error is None or MAX_ATTEMPTS not in self.options or message.attempt_count >= message.max_attempts
        if is_final:
            status = TaskResultStatus.SUCCESSFUL if error is None else TaskResultStatus.FAILED
            _set(result, status=status, finished_at=timezone.now())
            task_finished.send_robust(type(self), task_result=result)
        if error is None:
            return None
        outcome = outcome_of_exception(error, is_permanent=is_final)
        outcome.is_logged = is_final and outbox.settings.error_texts  # By Django, at the signal.
        return outcome

    def _store(self, message: Message[Any], result: TaskResult) -> None:
        errors = [[error.exception_class_path, error.traceback] for error in result.errors]
        content = json.dumps({"return_value": result._return_value, "errors": errors})
        if (keyring := keyring_of(outbox.settings.encryption_keys)) is not None:
            content = keyring.seal(content, Identity("content", TOPIC, result.id), dedupe_key=None)
        token = {"id": message.id, "created_at": message.created_at, "attempt_count": message.attempt_count}
        connection = connections[conf.alias()]
        is_own = not connection.in_atomic_block
        with conf.transaction_of(connection), connection.cursor() as cursor:
            if is_own:  # Where transactions are serializable by default, those of other results would conflict.
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute(_WRITE, token | {"content": content, "after_id": random.randrange(message.id)})


def queues() -> list[str]:
    """Return the queues of a worker that names none, with weights: those of all tasks, and those of topics."""
    backends = [one for one in task_backends.all() if isinstance(one, OutboxBackend)]
    names = sorted({name for one in backends for name in one.queues or ("default",)})
    return [*(f"{name}{lane}:{weight}" for name in names for lane, weight in _WEIGHTS.items()), "*:4"]


@outbox.handler(conf.SCHEDULED_TOPIC, transactional=True)
def enqueue_scheduled(message: Message[Any], ctx: SyncContext) -> Outcome | None:
    """Enqueue the task of a schedule. The message waits while this process does not know the schedule."""
    name = message.headers.get("schedule", "")
    if name not in OutboxBackend.scheduled:
        return Unavailable(f"this process has no schedule {name!r}")
    task, args, kwargs = OutboxBackend.scheduled[name]
    task_backends[task.backend].enqueue_in(ctx.connection, task, args, kwargs)
    return None


# Arguments have no names by which secrets among them are found.
outbox.define(Topic(TOPIC, encrypted=conf.has_keys(), redact=("args",)))


@outbox.handler(TOPIC)
def run(message: Message[Any], ctx: SyncContext) -> Outcome | None:  # noqa: ARG001
    """Run the task that the message names. It waits while this process does not know the task."""
    try:
        backend = task_backends[message.payload["backend"]]
        result = backend.get_result(str(message.id))
    except Exception as error:  # noqa: BLE001 - the task's module is imported, which may raise anything
        return Unavailable(f"the task cannot be loaded: {type(error).__name__}: {error}")
    return backend.run(message, result)  # type: ignore[no-any-return]


def _task_of(payload: Mapping[str, Any]) -> Task:
    task = import_string(payload["task"])
    if not isinstance(task, Task):
        raise ImproperlyConfigured(f"{payload['task']}: must be a task, not {type(task).__name__}")
    run_after = payload["run_after"] and datetime.fromisoformat(payload["run_after"])
    task = copy.copy(task)  # `using` would ask the settings of today.
    _set(
        task, priority=payload["priority"], queue_name=payload["queue"], run_after=run_after, backend=payload["backend"]
    )
    return task


def _result_of(task: Task, payload: Mapping[str, Any], **state: Any) -> TaskResult:  # noqa: ANN401
    times = dict.fromkeys(("started_at", "last_attempted_at", "finished_at")) | state
    given = {name: payload[name] for name in ("args", "kwargs", "backend")}
    enqueued_at = datetime.fromisoformat(payload["enqueued_at"])
    return TaskResult(task=task, enqueued_at=enqueued_at, errors=[], worker_ids=[], **given, **times)


def _opened(text: str, identity: Identity) -> Any:  # noqa: ANN401
    value = json.loads(text)
    if is_sealed(value):
        return json.loads(unseal(value, keyring_of(outbox.settings.encryption_keys), identity))
    return value


def _set(frozen: Task | TaskResult, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(frozen, name, value)  # It is frozen for everyone but the backend.
