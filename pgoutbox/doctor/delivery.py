"""The checks of the backlog: late messages and their cause, failures, and overdue retention."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from dataclasses import replace

from psycopg.errors import InsufficientPrivilege, RaiseException
from psycopg.rows import DictRow

from pgoutbox.database import sql
from pgoutbox.doctor.context import MOST_QUEUES, DoctorContext
from pgoutbox.doctor.findings import (
    HOW_TO,
    MAX_QUOTE_LENGTH,
    Finding,
    duration,
    join_names,
    ok,
    problem,
    skipped,
    warning,
)
from pgoutbox.doctor.transports import is_served
from pgoutbox.encryption import SEALED, decrypted, keyring_of
from pgoutbox.message import Transient
from pgoutbox.operations.operator import FAIR_COUNTS
from pgoutbox.redaction import redact_text
from pgoutbox.text import Count, one_line, pluralize
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.transports.redirect import redirected_mail
from pgoutbox.transports.registry import hint_for, missing_key
from pgoutbox.worker.alert import handlers_of
from pgoutbox.worker.payloads import SampledPayload, find_unreadable, sample_parameters

_COMPARE_HANDLERS = "pgoutbox doctor --app yourapp.outbox:outbox"
_LATE_QUEUES = 50
_LATE_KEYS = 1_000  # Of each queue, those that wait longest.
_SHARES = {
    "keys-paused": ("paused", "their messages wait for a turn", "set a limit", "--max-in-flight N"),
    "keys-limited": (
        "at their limit", "they get a turn only if one of theirs ends", "raise its limit", "--max-in-flight N",
    ),
    "keys-rate-limited": ("at their rate", "they get one turn after the other", "raise its rate", "--rate RATE"),
}  # fmt: skip
# The late queues with such a cause are one finding.
_SHARED = ("due-without-worker", "due-behind-breaker")
_START_WORKERS = (
    "start workers for these queues: pgoutbox worker --queue '*' serves all; with cron, check that the line of the "
    "crontab runs"
)
# The queues share these rows, of each lane.
_ROWS = 10_000
_TOPICS = 20_000
_TOPICS_NAMED = 20
_WITHOUT_HANDLER = "workers never claim messages without a handler"
_WITHOUT_APP = f"name the application of the workers: {_COMPARE_HANDLERS}"


def check_partitions(context: DoctorContext) -> Iterator[Finding]:
    """Check that partitions exist for messages that end soon."""
    facts = context.ask_one(sql.DONE_PARTITIONS)
    if not facts["dated"]:
        yield skipped("no-dated-partitions", "message_done has no partitions by date")
    elif facts["ahead_seconds"] < context.limits.partition_seconds:
        if facts["ahead_seconds"] > 0:
            code = "partitions-end-soon"
            what = f"the partitions of message_done end in {duration(facts['ahead_seconds'])}"
        elif facts["last_seconds"] > 0:
            code = "partition-of-today-missing"
            what = "message_done has no partition for today, but later ones"
        else:
            code = "partitions-ended"
            what = f"the last partition of message_done ended {duration(-facts['last_seconds'])} ago"
        yield warning(
            code,
            what,
            "messages that end later go to the default partition, from which retention deletes row by row",
            "workers create partitions in advance: check that one runs, and that its role can create them",
        )
    else:
        yield ok("partitions-in-order", f"message_done has partitions for {duration(facts['ahead_seconds'])}")


def check_retention(context: DoctorContext) -> Iterator[Finding]:
    """Check that retention keeps up with its rules, and that a large table has a rule."""
    for rule in context.ask(sql.OVERDUE_RETENTION, {"seconds": context.limits.overdue_seconds}):
        yield warning(
            "retention-overdue",
            f"{rule['state']} messages of {rule['topic']} should have been deleted "
            f"{duration(rule['overdue_seconds'])} ago",
            "retention does not run or does not keep up: the table grows, and personal data stays for longer than the "
            "rule allows",
            "check that a worker runs, and that its role can delete; to apply the rules now: pgoutbox prune",
        )
    facts = context.ask_one(sql.RETENTION_NEED)
    if not facts["rules"] and facts["done_estimate"] >= context.limits.done_without_rules:
        yield warning(
            "retention-missing",
            f"about {facts['done_estimate']} finished messages, and no retention rule deletes them",
            "the table grows without end, and so does every backup",
            "pgoutbox retention set '*' sent 30d",
        )
    yield ok(
        "retention-in-order",
        f"{pluralize(facts['rules'], 'retention rule')}, and no message is overdue for deletion"
        if facts["rules"]
        else "no retention rules",
    )


def check_workers(context: DoctorContext) -> Iterator[Finding]:
    """Check that a worker runs, and name the queues that workers serve."""
    running, runs = _workers(context)
    if running:
        queues = sorted({queue for worker in running for queue in worker["queues"]})
        yield ok(
            "workers-running",
            f"{pluralize(len(running), 'worker')} running, for the queues {join_names(queues, most=20)}",
        )
    elif runs:
        ended = min(run["ended_seconds_ago"] for run in runs)
        yield ok("worker-ran-once", f"the last run with --once or --drain ended {duration(ended)} ago")
    else:
        yield warning("no-worker", "no worker is running", "no message is delivered", "start a worker: pgoutbox worker")


def _workers(context: DoctorContext) -> tuple[list[DictRow], list[DictRow]]:
    """Return the running workers with their queues and topics, and the last runs with `--once` or `--drain`."""
    rows = context.ask(sql.PRESENT_WORKERS)
    running = [row for row in rows if row["ended_seconds_ago"] is None]
    ended = [row for row in rows if row["ended_seconds_ago"] is not None]
    return running, [row for row in ended if row["ended_seconds_ago"] <= context.limits.run_seconds]


def check_handlers(context: DoctorContext) -> Iterator[Finding]:
    """Check that each topic with a definition or pending messages has a handler."""
    if context.outbox is None:
        yield skipped("no-application", "no application given", _WITHOUT_APP)
        return
    handlers = handlers_of(context.outbox, context.settings)
    rows = context.ask(sql.WAITING_TOPICS, _everywhere(context) | {"queues": MOST_QUEUES, "topics": _TOPICS})
    waiting = {row["topic"]: _count_of(row, "waiting") for row in rows if row["topic"] not in handlers}
    worst = sorted(waiting, key=lambda topic: (-waiting[topic].messages, topic))
    for topic in worst[:_TOPICS_NAMED]:
        count = waiting[topic]
        yield problem(
            "messages-without-handler",
            f"topic {topic} has no handler, and {count} of it {'waits' if count.messages == 1 else 'wait'}",
            _WITHOUT_HANDLER,
            _handler_for(topic),
            messages=count,
            topic=topic,
        )
    for row in rows:
        topic, version = row["topic"], row["newest_version"]
        if topic in handlers and version > handlers[topic].version:
            yield problem(
                "messages-without-handler",
                f"topic {topic}: messages with version {version} of the payload wait, and its handler knows version "
                f"{handlers[topic].version}",
                "workers never claim messages of a version that they do not know",
                "deploy the release that has it",
                topic=topic,
            )
    if more := worst[_TOPICS_NAMED:]:
        yield problem(
            "messages-without-handler",
            f"{pluralize(len(more), 'more topic')} with pending messages and no handler: {join_names(more)}",
            _WITHOUT_HANDLER,
            "run the doctor with the workers' --app",
            messages=sum((waiting[topic] for topic in more), start=Count(0)),
        )
    idle = sorted(set(context.outbox.topics) - set(handlers) - set(waiting))
    if idle:
        yield warning(
            "topics-without-handler",
            f"topics without a handler: {join_names(idle)}",
            "this application never delivers their messages",
            "register a handler in the module of --app, or run the doctor with the workers' --app",
        )
    among = " among those of each queue that are due first" if any(row["is_capped"] for row in rows) else ""
    yield ok(
        "handlers-in-order", f"{pluralize(len(handlers), 'topic')} with a handler, and no message without one{among}"
    )


def _handler_for(topic: str) -> str:
    if topic == ALERT_TOPIC:
        return "set PGOUTBOX_ALERT_DESTINATION for the workers and for the doctor"
    return (
        "register a handler, or deploy the release that has it; or cancel the messages: "
        f"pgoutbox cancel --all --topic {topic}"
    )


def check_leases(context: DoctorContext) -> Iterator[Finding]:
    """Check that attempts end within their lease, so that they do not depend on its renewal."""
    lease = context.settings.lease_seconds
    for row in context.ask(sql.HANDLER_SECONDS, {"attempts": context.limits.attempts}):
        if row["p99_seconds"] <= lease:
            continue
        yield warning(
            "attempts-outlast-lease",
            f"attempts of {row['topic']} take {duration(row['p99_seconds'])} (p99 of {row['attempts']} sent), "
            f"and the lease is {duration(lease)}",
            "they depend on lease renewal: if it fails, a second worker starts before the first attempt has ended",
            f"make the handler faster, or set PGOUTBOX_LEASE_SECONDS above {row['p99_seconds']:.0f}",
        )
    for row in context.ask(sql.LONG_IN_FLIGHT, {"seconds": context.limits.in_flight_seconds}):
        yield warning(
            "long-in-flight",
            f"topic {row['topic']} has had {pluralize(row['messages'], 'message')} in flight for up to "
            f"{duration(row['longest_seconds'])}, the oldest is message {row['first_id']}",
            "the handler takes that long, or the database refuses to write the outcome",
            "search the worker's log for finish_refused, which names the SQLSTATE; look for added triggers and "
            "constraints on the tables of pgoutbox",
        )
    yield ok("leases-in-order", f"no topic has attempts longer than the lease of {duration(lease)}")


def check_encryption(context: DoctorContext) -> Iterator[Finding]:
    """Check that encrypted topics have keys, and that the keys decrypt the pending payloads."""
    keys = context.settings.encryption_keys
    topics = () if context.outbox is None else context.outbox.topics.values()
    encrypted = sorted(topic.name for topic in topics if topic.encrypted)
    if encrypted and keys is None:
        yield problem(
            "encryption-keys-missing",
            f"encrypted topics without keys: {join_names(encrypted)}",
            "their messages cannot be enqueued or delivered",
            "set PGOUTBOX_ENCRYPTION_KEYS to the same keys for producers and workers",
        )
    reads_payloads = context.ask_one(sql.READS_PAYLOADS)["reads_payloads"]
    sealed = _unreadable_by_topic(context) if reads_payloads else _encrypted_by_topic(context)
    if sealed and keys is not None and not reads_payloads:
        user = context.connection.info.user
        yield skipped(
            "payloads-forbidden",
            f"encrypted payloads of {join_names(sorted(sealed))} are pending; "
            f"{user} cannot read them to check the keys",
            f"run the doctor with the worker's role, or: GRANT SELECT ON pgoutbox.message TO {user}",
        )
        return
    for topic, count in sealed.items():
        if count:
            yield problem(
                "payloads-undecryptable",
                f"no key of PGOUTBOX_ENCRYPTION_KEYS decrypts {pluralize(count, 'payload')} of {topic}",
                "each attempt fails, until no attempts are left",
                "append the key that encrypted them to PGOUTBOX_ENCRYPTION_KEYS",
            )
    if sealed:
        yield ok("payloads-decryptable", "the keys decrypt all pending payloads")
    yield ok("no-encrypted-payload", "no encrypted payload is pending")


def _unreadable_by_topic(context: DoctorContext) -> dict[str, int]:
    """Return the topics with encrypted pending payloads, and how many payloads no key decrypts."""
    keyring = keyring_of(context.settings.encryption_keys)
    unreadable: dict[str, int] = {}
    for row in context.ask(sql.SEALED_PAYLOADS, {"member": SEALED}):
        unreadable.setdefault(row["topic"], 0)
        try:
            decrypted(row["payload"], keyring)
        except Transient:
            unreadable[row["topic"]] += 1
    return unreadable


def _encrypted_by_topic(context: DoctorContext) -> dict[str, int]:
    """Return the topics with encrypted pending payloads and their number, for a role that cannot read payloads."""
    return {row["topic"]: row["messages"] for row in context.ask(sql.SEALED_TOPICS, {"member": SEALED})}


def check_payloads(context: DoctorContext) -> Iterator[Finding]:
    """Compare a sample of the pending payloads with the models of the application."""
    if context.outbox is None:
        yield skipped("no-application", "no application given", _WITHOUT_APP)
        return
    if not context.ask_one(sql.READS_PAYLOADS)["reads_payloads"]:
        user = context.connection.info.user
        yield skipped(
            "payloads-forbidden",
            f"{user} cannot read payloads to compare them with the models",
            f"run the doctor with the worker's role, or: GRANT SELECT ON pgoutbox.message TO {user}",
        )
        return
    settings = context.settings
    handlers = handlers_of(context.outbox, settings)
    rows = context.ask(sql.PENDING_PAYLOADS, sample_parameters(handlers, served=None))
    sample = (SampledPayload(**row) for row in rows)
    keyring = keyring_of(settings.encryption_keys)
    for topic, unreadable in find_unreadable(sample, handlers, keyring, settings.redacted_names).items():
        do = "does" if unreadable.message_count == 1 else "do"
        yield warning(
            "payloads-unreadable",
            f"{topic}: {unreadable.message_count} of {unreadable.sampled_count} sampled pending payloads "
            f"{do} not fit the model: {one_line(unreadable.reason, length=MAX_QUOTE_LENGTH)}",
            "they wait for a worker that can read them, and fail after the unreadable_timeout of the topic",
            "keep the workers of the other version running, or accept both forms in the model: "
            f"{HOW_TO}/topics.html#change-a-model",
            topic=topic,
        )
    yield ok("payloads-readable", "a sample of the pending payloads fits the models")


def _everywhere(context: DoctorContext) -> dict[str, object]:
    return {"names": [queue.queue for queue in context.ranked_queues()], "rows": _ROWS}


def check_due(context: DoctorContext) -> Iterator[Finding]:
    """Find queues with late messages, and the cause."""
    seconds = context.limits.late_seconds
    if not context.settings.listen:
        seconds = max(seconds, 2 * context.settings.poll_interval_seconds)
    late = [queue.queue for queue in context.ranked_queues() if (queue.oldest_seconds or 0) > seconds]
    running, runs = _workers(context)
    shared: dict[tuple[str, str | None], tuple[str, list[tuple[DictRow, Finding]]]] = {}
    names = late[:_LATE_QUEUES]
    for queue in context.ask(sql.DUE_FOR_LONG, {"names": names, "seconds": seconds, "rows": _ROWS}) if names else ():
        if queue["oldest_seconds"] <= 2 * _run_interval(context, queue["queue"], running, runs):
            continue
        what = f"queue {queue['queue']}: {_count_of(queue)} due, the oldest for {duration(queue['oldest_seconds'])}"
        if queue["halted"] and queue["free"]:
            what = f"{what}, {queue['halted']} of them halted behind a failed message of their ordering key"
        if 0 < queue["paused"] * 2 <= queue["free"]:
            what = f"{what}, {queue['paused']} of them of paused topics: {join_names(queue['paused_topics'])}"
        if 0 < queue["shared"] * 2 <= queue["free"]:
            what = f"{what}, {queue['shared']} of them of fair keys that get no turn"
        cause = _cause_of_limits(context, queue) or _cause_of_workers(context, queue, running, runs, late)
        about = {"queue": queue["queue"], **cause.about}
        found = replace(cause, what=f"{what}: {cause.what}", about=about, messages=_count_of(queue))
        if found.code in _SHARED:
            shared.setdefault((found.code, about.get("breaker")), (cause.what, []))[1].append((queue, found))
        else:
            yield found
    for what, findings in shared.values():
        yield _of_one_cause(what, findings, len(late))
    yield ok("nothing-late", f"no message has been due for more than {duration(seconds)}")


def _of_one_cause(what: str, findings: list[tuple[DictRow, Finding]], late_count: int) -> Finding:
    """Return one finding for all late queues with the same cause. `about` has the queues of a breaker, with commas."""
    queues, first = [queue for queue, _ in findings], findings[0][1]
    if len(queues) == 1:
        return first
    has_read_all = late_count <= _LATE_QUEUES
    count = sum((_count_of(queue) for queue in queues), start=Count(0, "exactly" if has_read_all else "at least"))
    names, number = [queue["queue"] for queue in queues], len(queues)
    which = pluralize(number, "queue") if has_read_all else f"at least {number} of {late_count} queues"
    is_unserved = first.code == "due-without-worker"
    return replace(
        first,
        what=f"{which}: {count} due, the oldest for {duration(queues[0]['oldest_seconds'])}: {what}; the queues: "
        f"{join_names(names)}",
        fix=_START_WORKERS if is_unserved else first.fix,
        about={} if is_unserved else {**first.about, "queue": ", ".join(names)},
        messages=count,
    )


def _run_interval(context: DoctorContext, queue: str, running: list[DictRow], runs: list[DictRow]) -> float:
    """Return the time between two runs of a queue that only runs with `--once` or `--drain` serve, else 0."""
    if any(queue in worker["queues"] for worker in running):
        return 0.0
    known = [run["run_interval_seconds"] or 0.0 for run in runs if queue in run["queues"]]
    return float(min([*known, context.limits.run_seconds])) if known else 0.0


def check_undelivered(context: DoctorContext) -> Iterator[Finding]:
    """Find messages that were due long ago and have no final state, whatever the reason."""
    seconds = context.limits.undelivered_seconds
    for row in context.ask(sql.UNDELIVERED, _everywhere(context) | {"seconds": seconds}):
        yield warning(
            "undelivered-for-long",
            f"queue {row['queue']}: {_count_of(row)} undelivered for more than {duration(seconds)}, message "
            f"{row['oldest_id']} for {duration(row['oldest_seconds'])}",
            "postponed attempts do not count, so such a message may never end by itself",
            f"pgoutbox show {row['oldest_id']} prints its attempts and the reason; if nobody can deliver it: "
            f"pgoutbox cancel {row['oldest_id']}",
            messages=_count_of(row),
            queue=row["queue"],
        )
    yield ok("nothing-undelivered", f"no message has been undelivered for more than {duration(seconds)}")


def _cause_of_limits(context: DoctorContext, queue: DictRow) -> Finding | None:
    """Return the finding if a late queue or its fair keys are paused or limited, or wait for others or a breaker."""
    name, why = queue["queue"], "they stay late until this is fixed"
    if queue["is_paused"]:
        return warning("due-paused", "it is paused", why, f"pgoutbox resume {name}")
    if queue["paused"] * 2 > queue["free"]:
        topics = queue["paused_topics"]
        return warning(
            "due-paused",
            f"{queue['paused']} of them of paused topics: {join_names(topics)}",
            why,
            f"pgoutbox resume --topic {topics[0]}",
            topic=topics[0],
        )
    if queue["free"] == 0 and not queue["halted"]:
        return warning(
            "due-behind-earlier",
            "all wait for an earlier message of their ordering key",
            why,
            f"check the state of the earlier message: pgoutbox list --queue {name}",
        )
    if queue["free"] == 0:
        first_id, waits = queue["halted_by"], "waits" if queue["halted"] == 1 else "wait"
        return problem(
            "due-behind-failed",
            f"{queue['halted']} {waits} behind a failed message of their ordering key, which is halted; the "
            f"first such message is {first_id}",
            "halts_key: no later message of that key is delivered",
            f"pgoutbox show {first_id}, then: pgoutbox redrive {first_id}; or if nobody can deliver it: "
            f"pgoutbox dismiss {first_id} --reason 'your reason'",
            message=str(first_id),
        )
    if queue["held"] * 2 > queue["messages"]:
        return problem(
            "due-behind-breaker",
            f"they wait behind the breaker of {one_line(queue['breaker'])}, open for "
            f"{duration(queue['open_seconds'])}: {_quoted(context, queue['last_error'])}",
            "they wait until a probe succeeds, and use up no attempts",
            _repair(queue["breaker"]),
            breaker=queue["breaker"],
        )
    if queue["tokens"] is not None and queue["tokens"] < 1:
        rate = f"{queue['rate_count']} in {queue['rate_seconds']:g} s"
        return warning(
            "due-rate-limited",
            f"its rate limit of {rate} is used up",
            why,
            f"pgoutbox limit {name} --rate none",
        )
    if queue["in_flight"] is not None and queue["in_flight"] >= queue["max_in_flight"]:
        return warning(
            "due-in-flight-limited",
            f"its limit of {queue['max_in_flight']} in flight is reached",
            why,
            f"pgoutbox limit {name} --in-flight none, or find out why attempts take so long",
        )
    if queue["shared"] * 2 > queue["free"]:
        return warning(
            "due-behind-shares",
            f"{queue['shared']} of them of fair keys that are paused, or at their limit or their rate",
            why,
            f"pgoutbox keys {name} lists the keys; to raise the limit of one: pgoutbox share {name} KEY "
            "--max-in-flight N",
        )
    return None


def _cause_of_workers(
    context: DoctorContext, queue: DictRow, running: list[DictRow], runs: list[DictRow], late: Collection[str]
) -> Finding:
    """Return the finding with the missing worker or handler of a late queue, else that workers do not keep up."""
    name = queue["queue"]
    serving = [worker for worker in (*running, *runs) if name in worker["queues"]]
    handled = {topic for worker in serving for topic in worker["topics"]}
    if context.outbox is not None:
        own = {topic for handler in handlers_of(context.outbox, context.settings).values() for topic in handler.handled}
        unknown = [topic for topic in queue["topics"] if topic not in handled | own]
        # Without a worker, one would deliver the messages of the other topics.
        if unknown and (serving or len(unknown) == len(queue["topics"])):
            return problem(
                "due-without-handler",
                f"topic {unknown[0]} has no handler" if len(unknown) == 1 else f"no handler for {join_names(unknown)}",
                _WITHOUT_HANDLER,
                _handler_for(unknown[0]),
                topic=unknown[0],
            )
        if not serving:
            handled = own
    if not running and not serving:
        return _without_worker(name)
    if not serving and not queue["is_worked"]:
        return problem(
            "due-in-unserved-queue",
            "no running worker serves this queue",
            "no message of it is delivered",
            f"start a worker for it: pgoutbox worker --queue {name}, beside the queues that it already serves; "
            "pgoutbox workers lists the queues of each worker",
        )
    missing = [topic for topic in queue["topics"] if topic not in handled]
    if missing and handled:
        return problem(
            "due-without-handler",
            f"no handler for {join_names(missing)} in a worker of this queue",
            "workers never claim them",
            "if the application has the handler, restart the workers with its current release; "
            f"if no release has it: pgoutbox cancel --all --topic {missing[0]}; to compare: {_COMPARE_HANDLERS}, and "
            "pgoutbox workers",
            topic=missing[0],
        )
    if queue["is_worked"]:
        return warning(
            "due-overloaded",
            "workers claim them but do not keep up",
            "new messages wait behind them",
            "raise PGOUTBOX_CONCURRENCY, start more workers, or make the handlers faster; pgoutbox top shows the rate",
        )
    if not running:
        return _without_worker(name)
    earlier = [[one for one in worker["queues"][: worker["queues"].index(name)] if one in late] for worker in serving]
    if all(earlier):
        others = sorted({one for few in earlier for one in few})
        return problem(
            "due-behind-queues",
            f"the workers of this queue deliver others first: {join_names(others)}",
            "queues without weights have a strict order: the later ones wait while the first ones have due messages",
            f"give the queues weights, such as --queue {earlier[0][0]}:4 --queue {name}:1, or start a worker for it: "
            f"pgoutbox worker --queue {name}",
        )
    return problem(
        "due-unclaimed",
        "workers of this queue are running, and have not begun them yet",
        "if that lasts for longer than a minute, the workers are blocked or cannot claim; after the end of a pause, a "
        "limit or an open breaker they begin within seconds",
        "look again in a minute, with pgoutbox workers and pgoutbox top; then search the log of the workers",
    )


def _without_worker(queue: str) -> Finding:
    return problem(
        "due-without-worker",
        "no worker is running",
        "no message is delivered",
        f"start a worker: pgoutbox worker --queue {queue}; with cron, check that the line of the crontab runs, and "
        "that it names this queue",
    )


def check_breakers(context: DoctorContext) -> Iterator[Finding]:
    """Find open circuit breakers."""
    for breaker in context.ask(sql.OPEN_BREAKERS):
        yield warning(
            "breaker-open",
            f"the breaker of {one_line(breaker['key'])} has been open for {duration(breaker['open_seconds'])}: "
            f"{_quoted(context, breaker['last_error'])}",
            "messages to it wait, and use up no attempts",
            _repair(breaker["key"]),
            breaker=breaker["key"],
        )
    yield ok("breakers-closed", "no circuit breaker is open")


def check_receivers(context: DoctorContext) -> Iterator[Finding]:
    """Find receivers that answer so slowly that their messages are postponed."""
    seconds = context.limits.late_seconds
    for row in context.ask(sql.STALLED, _everywhere(context) | {"seconds": seconds}):
        count = _count_of(row)
        yield warning(
            "receiver-stalled",
            f"{one_line(row['key'])} answers so slowly that {count} {'waits' if count.messages == 1 else 'wait'}, the "
            f"first for {duration(row['oldest_seconds'])}",
            "all sends that it may have at once wait for its answer; the other messages to it are postponed for some "
            "seconds, again and again",
            "let the receiver answer at once and work later, or shorten the timeout of the handler; the messages: "
            f"pgoutbox list --queue {row['queue']}",
            messages=count,
            queue=row["queue"],
        )
    yield ok("receivers-answer", f"no message has waited for a slow receiver for more than {duration(seconds)}")


def check_shares(context: DoctorContext) -> Iterator[Finding]:
    """Find queues with fair keys that are paused, at their limit or at their rate, and have waited for long."""
    seconds = context.limits.late_seconds
    for with_limits in context.ask(sql.LIMITED_SHARES, {"queues": _LATE_QUEUES}):
        queue = with_limits["queue"]
        rows = context.ask(sql.LIST_FAIR_KEYS, {"queue": queue, "prefix": "", "limit": _LATE_KEYS, **FAIR_COUNTS})
        late = [row for row in rows if (row["oldest_due_seconds"] or 0) > seconds]
        limited = [row for row in late if row["max_in_flight"] is not None and row["in_flight"] >= row["max_in_flight"]]
        waiting = {
            "keys-paused": [row for row in limited if row["max_in_flight"] == 0],
            "keys-limited": [row for row in limited if row["max_in_flight"] != 0],
            "keys-rate-limited": [
                row
                for row in late
                if row["next_turn_at"] is not None
                and (row["max_in_flight"] is None or row["in_flight"] < row["max_in_flight"])
            ],
        }
        for code, few in waiting.items():
            if few:
                state, why, remedy, option = _SHARES[code]
                yield warning(
                    code,
                    f"queue {queue}: {pluralize(len(few), 'fair key')} {state}, the oldest message due for "
                    f"{duration(few[0]['oldest_due_seconds'])}: {join_names([one_line(row['key']) for row in few])}",
                    why,
                    f"{remedy}: pgoutbox share {queue} {option} {_argument(few[0]['key'])}; or with --reset, give it "
                    f"the share of the queue; pgoutbox keys {queue} lists all keys",
                    messages=Count(sum(row["due"] for row in few), "at least"),
                    queue=queue,
                )
    found_late = f"a message due for more than {duration(seconds)}"
    yield ok("shares-in-order", f"no fair key at its limit or rate has had {found_late}")


def _argument(key: str) -> str:
    """Return a fair key for the command line."""
    return f"-- {shlex.quote(key)}" if key.startswith("-") else shlex.quote(key)


def _repair(breaker: str) -> str:
    return (
        "repair what the error names, such as the server, the account or the target; then a probe closes the "
        f"breaker, or at once: pgoutbox breaker close {shlex.quote(breaker)}"
    )


def check_schedules(context: DoctorContext) -> Iterator[Finding]:
    """Find schedules that enqueue nothing: their rule is wrong, no worker serves them, or no time is left."""
    for row in context.ask(sql.IDLE_SCHEDULES):
        name = row["name"]
        if row["problem"] is not None:
            what, remedy = f"schedule {name}: {one_line(row['problem'])}", "correct its rule or its time zone"
        elif row["ended_at"] is not None:
            what, remedy = f"schedule {name}: no time is left", "remove it, or change its rule or its end"
        else:
            what = f"schedule {name}: no worker has served it for {duration(row['late_seconds'])}"
            remedy = (
                "install 'pgoutbox[schedules]' for a worker; one with this schedule in its code, if it is from code"
            )
        yield warning("schedule-idle", what, "its messages are not enqueued", remedy, schedule=name)
    yield ok("schedules-served", "all schedules are served")


def check_unsubscribe(context: DoctorContext) -> Iterator[Finding]:
    """Check that suppressed addresses can be compared, and that the mail of lists has links to unsubscribe."""
    try:
        context.ask(sql.SUPPRESSED, {"addresses": [], "mailing_lists": []})
    except RaiseException as error:
        what, remedy = str(error.diag.message_primary), str(error.diag.message_hint)
        yield problem("suppressions-unknown", what, "no mail of a list is sent", remedy)
    except InsufficientPrivilege:
        pass  # A viewer must not compare addresses.
    topics = {} if context.outbox is None else context.outbox.topics
    lists = sorted({topic.mailing_list for topic in topics.values() if topic.mailing_list is not None})
    if lists and context.settings.unsubscribe.url is None:
        yield warning(
            "unsubscribe-url-missing",
            f"mailing lists without links to unsubscribe: {join_names(lists)}",
            "large mail providers ask for them, and people use the button for spam instead",
            "set PGOUTBOX_UNSUBSCRIBE_URL and PGOUTBOX_UNSUBSCRIBE_KEYS, or set the header in each handler",
        )
    yield ok("mailing-lists-in-order", "the mail of lists has links to unsubscribe" if lists else "no mailing list")


def check_redirect(context: DoctorContext) -> Iterator[Finding]:
    """Find redirects that are on, and blackouts that forbid them."""
    rows = context.ask(sql.READ_REDIRECTS)
    for row in rows:
        if row["source"] == "blackout":
            if len(rows) > 1:
                yield problem(
                    "redirect-forbidden",
                    f"the blackout {row['name']} forbids the redirect that is on",
                    "its e-mail waits, except to exempt addresses; notifications, webhooks and events wait too",
                    "run `pgoutbox redirect off`, or unset PGOUTBOX_REDIRECT_TO and restart the workers",
                )
        elif row["source"] == "operator":
            until = "" if row["until_at"] is None else f" until {row['until_at'].isoformat(timespec='seconds')}"
            yield warning(
                "redirect-by-operator",
                f"{one_line(row['name'])} redirects {redirected_mail(row['topics'], row['exempt_topics'])} to "
                f"{row['target']}{until}",
                "your users do not get it, and notifications, webhooks and events of these topics are held back",
                "run `pgoutbox redirect off`, unless this is a test",
            )
        else:
            yield warning(
                "redirect-by-worker",
                f"worker {row['name']}: PGOUTBOX_REDIRECT_TO={row['target']}: all of its e-mail goes there",
                "your users get no e-mail, and notifications, webhooks and events are held back",
                "unset PGOUTBOX_REDIRECT_TO and restart the worker, unless this is a test system",
            )
    yield ok("no-redirect", "no redirect is on")


def check_failed(context: DoctorContext) -> Iterator[Finding]:
    """Name the causes for which messages failed lately."""
    seconds = context.limits.failed_seconds
    causes = context.ask(
        sql.LIST_FAILURES, {"topic": None, "seconds": seconds, "cap": context.limits.failures_read, "limit": 10}
    )
    why = "failed messages are not retried, so their receivers get nothing"
    within = f"failed within the last {duration(seconds)}"
    for row in causes:
        more_exist = row["message_count"] >= context.limits.failures_read
        count = Count(row["messages"], "at least" if more_exist else "exactly")
        yield warning(
            "messages-failed",
            f"{count} of {row['topic']} {within}: {_quoted(context, row['error'])}",
            why,
            f"see them by cause: pgoutbox failures --topic {row['topic']}; fix the cause, then run: "
            f"pgoutbox redrive --group {row['error_group']}; if nobody can deliver them: "
            f"pgoutbox dismiss --group {row['error_group']} --reason 'your reason'",
            messages=count,
            topic=row["topic"],
            group=row["error_group"],
        )
    yield ok("nothing-failed", f"no message {within}")
    if causes and (more := causes[0]["group_count"] - len(causes)):
        rest = causes[0]["message_count"] - sum(row["messages"] for row in causes)
        yield warning(
            "more-messages-failed",
            f"{pluralize(rest, 'message')} {within} for {pluralize(more, 'more cause')}",
            why,
            "see them by cause: pgoutbox failures",
        )


def check_destinations(context: DoctorContext) -> Iterator[Finding]:
    """Check that the destination of each pending message has a transport."""
    settings = context.settings
    waiting = {
        row["scheme"]: _count_of(row)
        for row in context.ask(sql.PENDING_SCHEMES, _everywhere(context))
        if row["scheme"] is not None
    }
    missing = {scheme: count for scheme, count in waiting.items() if not is_served(scheme, settings, context.outbox)}
    keys = [missing_key(scheme) for scheme in missing]
    reported = {row["key"] for row in context.ask(sql.MISSING_TRANSPORTS, {"keys": keys})} if missing else set()
    running, runs = _workers(context)
    has_workers = bool(running or runs)
    for scheme, count in missing.items():
        what = f"{count} for {scheme} destinations"
        if has_workers and missing_key(scheme) not in reported:
            # On call, people run the doctor without the settings of the workers.
            yield skipped(
                "transport-not-set-here",
                f"{what}; this process has no transport for {scheme}, and no worker reports that it has none",
                "to check it, run the doctor with the environment and --app of a worker",
            )
            continue
        where = "workers have no transport for it" if has_workers else "this process has no transport for it"
        yield warning(
            "destination-without-transport",
            f"{what}, but {where}",
            "unless their handlers send by themselves, they wait until a worker has the transport",
            f"{hint_for(scheme) or 'check the spelling of the scheme, or add its transport'}, "
            "on the machines of the workers",
        )
    if waiting.keys() & {"https", "http"} and settings.webhook.secrets is None:
        yield warning(
            "webhooks-unsigned",
            "webhooks are pending, and PGOUTBOX_WEBHOOK_SECRETS is not set for this process",
            "unless handlers use their own secrets, receivers cannot tell your webhooks from forged ones",
            "set PGOUTBOX_WEBHOOK_SECRETS, and give it to the receivers",
        )
    yield ok("destinations-in-order", "all destinations of pending messages have a transport")


def _count_of(row: DictRow, column: str = "messages") -> Count:
    return Count(row[column], "at least" if row["is_capped"] else "exactly")


def _quoted(context: DoctorContext, error: str | None) -> str:
    if error is None:
        return "no error recorded"
    return one_line(redact_text(error, context.settings.redacted_names), length=MAX_QUOTE_LENGTH)
