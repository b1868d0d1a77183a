"""The checks of what is owed: whether it goes out, why not, and whether the old goes away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from psycopg.errors import InsufficientPrivilege

from pgoutbox.database import sql
from pgoutbox.doctor.findings import (
    MAX_QUOTE_LENGTH,
    Note,
    counted,
    duration,
    listed,
    ok,
    one_line,
    problem,
    skipped,
    warning,
)
from pgoutbox.doctor.transports import is_served
from pgoutbox.encryption import SEALED, decrypted, keyring_of
from pgoutbox.message import Transient
from pgoutbox.redaction import redact_text
from pgoutbox.transports.registry import hint_for

if TYPE_CHECKING:
    from psycopg.rows import DictRow

    from pgoutbox.doctor.context import Patient

_WITHOUT_APP = "pass --app, or set PGOUTBOX_APP"


def check_partitions(patient: Patient) -> Iterator[Note]:
    """Whether what will be finished has a partition to go to."""
    facts = patient.ask_one(sql.DONE_PARTITIONS)
    if not facts["dated"]:
        yield skipped("message_done has no partitions by date")
    elif facts["ahead_seconds"] < patient.limits.partition_seconds:
        if facts["ahead_seconds"] > 0:
            what = f"in {duration(facts['ahead_seconds'])} message_done has no partition"
        elif facts["last_seconds"] > 0:
            what = "message_done has no partition for today, though it has later ones"
        else:
            what = f"the last partition of message_done ended {duration(-facts['last_seconds'])} ago"
        yield warning(
            what,
            "what is finished later goes to the default partition, from which retention deletes row by row",
            "workers make partitions ahead: see that one runs, with a role that may",
        )
    else:
        yield ok(f"partitions of message_done are there for {duration(facts['ahead_seconds'])}")


def check_retention(patient: Patient) -> Iterator[Note]:
    """Whether the rules are kept, and whether there are any where it matters."""
    overdue = patient.ask(sql.OVERDUE_RETENTION, {"seconds": patient.limits.overdue_seconds})
    for rule in overdue:
        yield warning(
            f"messages of {rule['topic']} that ended {rule['state']} should have been deleted "
            f"{duration(rule['overdue_seconds'])} ago",
            "retention does not run or does not keep up: the table grows, and personal data stays for longer than said",
            "see that a worker runs, with a role that may delete; pgoutbox prune keeps the rules at once",
        )
    facts = patient.ask_one(sql.RETENTION_NEED)
    if not facts["rules"] and facts["done_estimate"] >= patient.limits.done_without_rules:
        yield warning(
            f"about {facts['done_estimate']} messages are done and no rule says when they go",
            "the table grows for ever, and so does every backup",
            "pgoutbox retention set '*' sent 30d",
        )
    elif not overdue:
        yield ok(
            f"{counted(facts['rules'], 'rule')} of retention, and nothing overdue"
            if facts["rules"]
            else "nothing is to be deleted"
        )


def check_workers(patient: Patient) -> Iterator[Note]:
    """Whether anybody works at all."""
    facts = patient.ask_one(sql.CONNECTED_WORKERS)
    if facts["workers"]:
        yield ok(f"{counted(facts['workers'], 'worker')} connected")
    elif not facts["sees_all"] and (holders := _lease_holders(patient)):
        yield ok(f"{counted(holders, 'worker')} at work: leases are held")
    elif not facts["sees_all"]:
        yield skipped(
            f"no worker is connected as {patient.connection.info.user}; of other roles this role sees nothing",
            f"let it see them: GRANT pg_read_all_stats TO {patient.connection.info.user}",
        )
    else:
        yield warning("no worker is connected", "nothing is delivered", "start one: pgoutbox worker")


def _lease_holders(patient: Patient) -> int:
    """How many workers hold leases, as far as this role may know."""
    try:
        return int(patient.ask_one(sql.LEASE_HOLDING_WORKERS)["workers"])
    except InsufficientPrivilege:
        return 0


def check_handlers(patient: Patient) -> Iterator[Note]:
    """Whether each topic that is defined, or waits, has a handler."""
    if patient.outbox is None:
        yield skipped("the application is not known", _WITHOUT_APP)
        return
    handlers = patient.outbox.handlers
    waiting: dict[str, int] = {}
    for row in patient.ask(sql.PENDING_TOPICS):
        if row["topic"] not in handlers:
            waiting[row["topic"]] = waiting.get(row["topic"], 0) + row["messages"]
    for topic, count in waiting.items():
        yield problem(
            f"topic {topic} has no handler, and it has {counted(count, 'message')} waiting",
            "workers leave them alone for ever",
            "register a handler, or deploy the release that has it; or cancel them: "
            f"pgoutbox cancel --all --topic {topic}",
        )
    idle = sorted(set(patient.outbox.topics) - set(handlers) - set(waiting))
    if idle:
        yield warning(
            f"defined without a handler: {listed(idle)}",
            "what is enqueued with such a topic is never delivered by this application",
            "register a handler where --app finds it, or give the doctor the application of the workers",
        )
    if not waiting and not idle:
        yield ok(f"{counted(len(handlers), 'topic')} with a handler, and nothing else waits")


def check_leases(patient: Patient) -> Iterator[Note]:
    """Whether attempts end within their lease, so that they do not depend on its renewal."""
    lease = patient.settings.lease_seconds
    slow = [
        row
        for row in patient.ask(sql.HANDLER_SECONDS, {"attempts": patient.limits.attempts})
        if row["p99_seconds"] > lease
    ]
    for row in slow:
        yield warning(
            f"attempts of {row['topic']} take {duration(row['p99_seconds'])} (p99 of {row['attempts']} sent), "
            f"and the lease is {duration(lease)}",
            "they live by its renewal: where that fails, a second worker starts before the first has ended",
            f"make the handler quicker, or set PGOUTBOX_LEASE_SECONDS above {row['p99_seconds']:.0f}",
        )
    lasting = patient.ask(sql.LONG_IN_FLIGHT, {"seconds": patient.limits.in_flight_seconds})
    for row in lasting:
        yield warning(
            f"topic {row['topic']} has had {counted(row['messages'], 'message')} in flight for up to "
            f"{duration(row['longest_seconds'])}, message {row['first_id']} first",
            "the handler takes that long, or the database refuses to write the outcome",
            "search the worker's log for finish_refused: it names the SQLSTATE; look for triggers and constraints that "
            "were added to the tables of pgoutbox",
        )
    if not slow and not lasting:
        yield ok(f"no topic's attempts are known to take longer than the lease of {duration(lease)}")


def check_encryption(patient: Patient) -> Iterator[Note]:
    """Whether encrypted topics have keys, and whether these open what waits."""
    keys = patient.settings.encryption_keys
    topics = () if patient.outbox is None else patient.outbox.topics.values()
    encrypted = sorted(topic.name for topic in topics if topic.encrypted)
    if encrypted and keys is None:
        yield problem(
            f"encrypted topics without keys: {listed(encrypted)}",
            "nothing can be enqueued with them, nor delivered",
            "set PGOUTBOX_ENCRYPTION_KEYS, the same for producers and workers",
        )
    reads_payloads = patient.ask_one(sql.READS_PAYLOADS)["reads_payloads"]
    sealed = _sealed(patient) if reads_payloads else _seen_sealed(patient)
    if sealed and keys is not None and not reads_payloads:
        user = patient.connection.info.user
        yield skipped(
            f"encrypted payloads wait of {listed(sorted(sealed))}; {user} may not read them to see whether a key opens "
            "them",
            f"run the doctor as the worker, or: GRANT SELECT ON pgoutbox.message, pgoutbox.large_payload TO {user}",
        )
        return
    closed = {topic: count for topic, count in sealed.items() if count}
    for topic, count in closed.items():
        yield problem(
            f"no key of PGOUTBOX_ENCRYPTION_KEYS opens {counted(count, 'payload')} of {topic}",
            "their attempts fail until they are used up",
            "add the key that they were encrypted with, behind the others",
        )
    if not closed and not (encrypted and keys is None):
        yield ok("every encrypted payload that waits can be opened" if sealed else "no encrypted payload waits")


def _sealed(patient: Patient) -> dict[str, int]:
    """The topics of which encrypted payloads wait, with the number of those that no key opens."""
    keyring = keyring_of(patient.settings.encryption_keys)
    closed: dict[str, int] = {}
    for row in patient.ask(sql.SEALED_PAYLOADS, {"member": SEALED}):
        closed.setdefault(row["topic"], 0)
        try:
            decrypted(row["payload"], keyring)
        except Transient:
            closed[row["topic"]] += 1
    return closed


def _seen_sealed(patient: Patient) -> dict[str, int]:
    """The same for a role that may not read payloads: without a key none is opened, and with one nobody knows."""
    return {row["topic"]: row["messages"] for row in patient.ask(sql.SEALED_TOPICS, {"member": SEALED})}


def check_due(patient: Patient) -> Iterator[Note]:
    """What has been due for long, and why nobody takes it."""
    seconds = patient.limits.late_seconds
    if not patient.settings.listen:
        seconds = max(seconds, 2 * patient.settings.sweep_seconds)
    late = patient.ask(sql.DUE_FOR_LONG, {"seconds": seconds})
    if not late:
        yield ok(f"no message has been due for more than {duration(seconds)}")
        return
    connected = patient.ask_one(sql.CONNECTED_WORKERS)
    for queue in late:
        count = counted(queue["messages"], "message") + (" or more" if queue["messages"] >= 10_000 else "")
        what = f"queue {queue['queue']}: {count} due, the oldest for {duration(queue['oldest_seconds'])}"
        yield _reason(patient, queue, connected, what)


def _reason(patient: Patient, queue: DictRow, connected: DictRow, what: str) -> Note:
    """Why a queue stands still: what somebody has set first, then what is missing."""
    name, why = queue["queue"], "they are late for as long as this lasts"
    if queue["is_paused"]:
        return warning(f"{what}: it is paused", why, f"pgoutbox resume {name}")
    if queue["free"] == 0 and not queue["halted"]:
        return warning(f"{what}: all wait for an earlier message of their ordering key", why, "see how that one fares")
    if queue["free"] == 0:
        return warning(
            f"{what}: {queue['halted']} wait behind a failed message of their ordering key, which is halted",
            "on_failed=halt: nothing of that key goes out before it",
            f"pgoutbox list --state failed --queue {name}, then redrive or prune what failed first",
        )
    if queue["halted"]:
        what = f"{what}, {queue['halted']} of them halted behind a failed message of their ordering key"
    if queue["tokens"] is not None and queue["tokens"] < 1:
        rate = f"{queue['rate_count']} in {queue['rate_seconds']:g} s"
        return warning(f"{what}: its rate limit of {rate} is used up", why, f"pgoutbox limit {name} --rate none")
    if queue["in_flight"] is not None and queue["in_flight"] >= queue["max_in_flight"]:
        return warning(
            f"{what}: as many are in flight as its limit of {queue['max_in_flight']} allows",
            why,
            f"pgoutbox limit {name} --in-flight none, or see why attempts take so long",
        )
    if not connected["workers"]:
        return problem(
            f"{what}: no worker is connected" + ("" if connected["sees_all"] else " that this role can see"),
            "nothing is delivered",
            f"start one: pgoutbox worker --queue {name}",
        )
    handlers = {} if patient.outbox is None else patient.outbox.handlers
    missing = [topic for topic in queue["topics"] if topic not in handlers]
    if patient.outbox is not None and len(missing) == len(queue["topics"]):
        return problem(f"{what}: no handler for {listed(missing)}", "workers leave them alone", "see `handlers`")
    if queue["is_worked"]:
        return warning(
            f"{what}: workers are at it and do not keep up",
            "what is enqueued now waits its turn",
            "raise PGOUTBOX_CONCURRENCY, start more workers, or make the handlers quicker; pgoutbox top shows the pace",
        )
    return problem(
        f"{what}: a worker is connected and does not claim them",
        "it serves other queues, has no handler for them, or does not keep up",
        f"see that one was started with --queue {name} and is not held up; pgoutbox workers, pgoutbox top",
    )


def check_breakers(patient: Patient) -> Iterator[Note]:
    """What is held to be dead."""
    found = patient.ask(sql.OPEN_BREAKERS)
    for breaker in found:
        yield warning(
            f"the breaker of {one_line(breaker['key'])} has been open for {duration(breaker['open_seconds'])}: "
            f"{_quoted(patient, breaker['last_error'])}",
            "messages to it wait, and use up no attempts",
            "mend the server or the way to it; a probe finds out, and everything goes out by itself",
        )
    if not found:
        yield ok("no circuit breaker is open")


def check_failed(patient: Patient) -> Iterator[Note]:
    """Whether more and more waits for a person."""
    topics = patient.ask(sql.FAILING_TOPICS)
    growing = [row for row in topics if row["today"] >= max(patient.limits.failed_a_day, 2 * row["yesterday"])]
    for row in growing:
        today = counted(row["today"], "message")
        yield warning(
            f"{today} of {row['topic']} failed in the last day, {row['yesterday']} in the one before; the last one: "
            f"{_quoted(patient, row['last_error'])}",
            "they are not tried again: people do not get what they are owed",
            f"mend the cause, then pgoutbox redrive --all-failed --topic {row['topic']}",
        )
    if not growing:
        total = sum(row["failed"] for row in topics)
        yield ok(f"failed and waiting for a person: {total}, no more than usual" if total else "nothing has failed")


def check_destinations(patient: Patient) -> Iterator[Note]:
    """Whether there is a transport for where waiting messages go."""
    settings = patient.settings
    waiting: dict[str, int] = {}
    for row in patient.ask(sql.PENDING_TOPICS):
        if row["scheme"] is not None:
            waiting[row["scheme"]] = waiting.get(row["scheme"], 0) + row["messages"]
    missing = {scheme: count for scheme, count in waiting.items() if not is_served(scheme, settings, patient.outbox)}
    for scheme, count in missing.items():
        yield warning(
            f"waiting for destinations {scheme}: {counted(count, 'message')}, and these settings have no transport",
            "unless their handlers send by themselves, they wait until there is one",
            f"{hint_for(scheme).removeprefix('; ') or 'check how the scheme is spelt, or add its transport'}, "
            "where workers run",
        )
    if waiting.keys() & {"https", "http"} and settings.webhook_secrets is None:
        yield warning(
            "webhooks wait and PGOUTBOX_WEBHOOK_SECRETS is not set",
            "unless handlers bring secrets of their own, nobody can tell your webhooks from a forger's",
            "set PGOUTBOX_WEBHOOK_SECRETS, and tell it to the receivers",
        )
    elif not missing:
        yield ok("there is a transport for every destination that waits")


def _quoted(patient: Patient, error: str | None) -> str:
    if error is None:
        return "no error is known"
    return one_line(redact_text(error, patient.settings.redacted_names), length=MAX_QUOTE_LENGTH)
