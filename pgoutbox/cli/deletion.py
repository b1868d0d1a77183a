"""The commands that keep, delete and hand out data: `prune`, `retention`, `erase`, `export` and `mentions`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final

import typer

from pgoutbox.cli.arguments import duration_option, format_keep, parse_final_state, parse_keep, read_ids
from pgoutbox.cli.console import FAILED, print_error, print_json, print_line, print_note, print_table, progress
from pgoutbox.cli.options import (
    DatabaseOptions,
    DryRun,
    IdFile,
    Ids,
    InTopic,
    Options,
    RuleState,
    RuleTopic,
    Yes,
    command,
    expanded,
    open_operator,
    read_settings,
)
from pgoutbox.cli.program import app, confirm, interruptible
from pgoutbox.message import FINAL_STATES, State
from pgoutbox.operations import EraseResult, Erasure, Mention, RetentionRule
from pgoutbox.operations.retention import PRUNED_BY_DEFAULT
from pgoutbox.text import pluralize

_COUNTED: Final = ("key_heads", "dedupe_keys", "acts", "partitions_dropped")

retention_app = typer.Typer(rich_markup_mode=None)
app.add_typer(retention_app, name="retention")


@command()
def prune(
    *,
    older_than: Annotated[
        timedelta | None, duration_option("--older-than", "Minimum time since the messages became final, such as 30d.")
    ] = None,
    states: Annotated[
        list[State] | None,
        typer.Option(
            "--state",
            parser=parse_final_state,
            metavar="STATE",
            help="sent, skipped, cancelled or failed (default: the first three). Repeatable.",
        ),
    ] = None,
    topic: InTopic = None,
    yes: Yes = False,
    options: Options,
) -> None:
    """Delete old final messages.

    Also deletes their attempts, payloads and dedupe keys, and commits each batch. Without --older-than, it applies the
    rules of `pgoutbox retention`.
    """
    if older_than is None and (states or topic):
        raise typer.BadParameter("--state and --topic need --older-than")
    chosen = frozenset(states or PRUNED_BY_DEFAULT)
    settings = options.settings  # Warns of a misspelt variable before the question.
    if older_than is not None:
        age = f"{older_than / timedelta(days=1):g} days"
        action = f"delete every message that has been {' or '.join(sorted(chosen))} for {age}"
        confirm(action, yes=yes or bool(states or topic))
    with open_operator(settings) as operator, interruptible("the deletions so far are committed"):
        if older_than is None:
            chosen = FINAL_STATES
            if not operator.retention_rules():
                print_note("no retention rules, so no message is deleted; add a rule with: pgoutbox retention set")
            with progress("deleting") as report:
                totals = operator.prune_by_retention(progress=report)
        else:
            total = None
            if sys.stderr.isatty():
                total = sum(operator.count_prunable(older_than, states=chosen, topic=topic).values())
            with progress("deleting", total) as report:
                totals = operator.prune(older_than, states=chosen, topic=topic, progress=report)
    deleted = {state.value: totals.messages.get(state, 0) for state in sorted(chosen)}
    others = ((totals.partitions_dropped, "whole partition"), (totals.acts, "old act"))
    rest = "".join(f", and {pluralize(count, noun)}" for count, noun in others if count)
    options.print(
        {"deleted": deleted} | {name: getattr(totals, name) for name in _COUNTED},
        f"{pluralize(totals.total, 'message')} deleted{rest}",
    )


@retention_app.callback(invoke_without_command=True)
@expanded
def retention(options: Options) -> None:
    """List the retention rules, by topic and state.

    Messages without a rule are kept forever. Workers and `pgoutbox prune` apply the rules. With --json one document per
    line.
    """
    options.context.obj = options
    if options.context.invoked_subcommand is not None:
        return
    with open_operator(options.settings, read_only=True) as operator:
        rules = operator.retention_rules()
    if options.as_json:
        for rule in rules:
            print_json(_rule_as_json(rule))
        return
    print_table(RetentionRule._fields, [(rule.topic, rule.state, format_keep(rule.keep)) for rule in rules])


@command("set", of=retention_app)
def set_retention(
    topic: RuleTopic,
    state: RuleState,
    keep: Annotated[str, typer.Argument(metavar="KEEP", help="Retention time, such as 30d; 0; or forever.")],
    *,
    options: Options,
) -> None:
    """Set how long messages of a topic are kept in a state.

    Workers and `pgoutbox prune` delete messages after this time. With 0 for sent, workers delete each message when
    it is sent; this takes effect within a minute.
    """
    rule = RetentionRule(topic, state, parse_keep(keep))
    with open_operator(options.settings) as operator:
        operator.set_retention(*rule)
    options.print(_rule_as_json(rule), f"topic {topic}, {state}: kept {format_keep(rule.keep)}")


@command("unset", of=retention_app)
def unset_retention(topic: RuleTopic, state: RuleState, *, options: Options) -> None:
    """Remove a retention rule."""
    with open_operator(options.settings) as operator:
        unset = operator.unset_retention(topic, state)
    text = f"topic {topic}, {state}: {'rule removed' if unset else 'there was no rule'}"
    options.print({"topic": topic, "state": state, "unset": unset}, text)


def _rule_as_json(rule: RetentionRule) -> dict[str, object]:
    seconds = None if rule.keep is None else rule.keep.total_seconds()
    return {"topic": rule.topic, "state": rule.state, "keep_seconds": seconds}


_ERASED_SO_FAR: Final = "the erasures so far are committed; run the command again for the rest"
_REASONS: Final = {
    EraseResult.IN_FLIGHT: "is in flight and was asked to stop; erase it again after its attempt",
    EraseResult.LOCKED: "or its key is locked by another transaction; erase it again",
    EraseResult.CHANGED: "got another owner or destination meanwhile",
    EraseResult.MISSING: "does not exist",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The arguments and options that select messages in every state."""

    message_ids: Ids = None
    file: IdFile = None
    owner: Annotated[str | None, typer.Option(help="All messages of this owner.")] = None
    destination: Annotated[
        str | None, typer.Option(metavar="URI", help="All messages to this URI or e-mail address.")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the selection as arguments of the operator's methods."""
        given = (bool(self.message_ids), self.file is not None, self.owner is not None, self.destination is not None)
        if given.count(True) != 1:
            raise typer.BadParameter("give message ids, --file, --owner or --destination, and only one of them")
        ids = (self.message_ids or None) if self.file is None else read_ids(self.file)
        return {"ids": ids, "owner": self.owner, "destination": self.destination}


@command()
def erase(which: Selection, *, dry_run: DryRun = False, yes: Yes = False, options: Options) -> None:
    """Delete all data of messages in every state.

    Deletes payloads, attempts and keys, and removes the owner and the address from the audit. Then lists the rows that
    still mention them. Exits with 1 if a message is left, for example because it is in flight.
    """
    chosen = which.arguments()
    with open_operator(options.settings) as operator:
        counts = operator.count_erasable(**chosen)
        if dry_run:
            _print_preview(counts, options)
            return
        total = sum(counts.values())
        confirm(f"erase {pluralize(total, 'message')} and all their traces", yes=yes)
        with interruptible(_ERASED_SO_FAR), progress("erase", total) as report:
            done = operator.erase(**chosen, progress=report)
    if options.as_json:
        print_json(_erasure_as_json(done))
    else:
        _print_erasure(done)
    if not done.is_complete or EraseResult.MISSING in done.results.values():
        raise typer.Exit(FAILED)


@command()
def export(which: Selection, *, place: DatabaseOptions) -> None:
    """Print all data of messages as JSON, one document per line.

    Needs a login that may read payloads. Opens encrypted payloads with PGOUTBOX_ENCRYPTION_KEYS. Nothing is redacted.
    """
    chosen = which.arguments()
    count = 0
    with open_operator(read_settings(place.dsn, place.database)) as operator:
        for message in operator.export(**chosen):
            print_json(message)
            count += 1
    print_note(f"exported {pluralize(count, 'message')}")


@command()
def mentions(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="An address or a name.")],
    *,
    options: Options,
) -> None:
    """Find the rows that contain a text.

    Searches all tables, also payloads, ignoring case. Needs a login that may read payloads. Does not search encrypted
    payloads. With --json one document per line.
    """
    with open_operator(options.settings) as operator:
        found = operator.mentions(*texts)
    options.print_rows(Mention._fields, found)


def _print_preview(counts: Mapping[State, int], options: Options) -> None:
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    text = f"would erase {pluralize(sum(counts.values()), 'message')}" + (f": {states}" if states else "")
    options.print({"would": "erase", **{state.value: count for state, count in counts.items()}}, text)


def _erasure_as_json(done: Erasure) -> dict[str, object]:
    by_result = {
        result.value: [message_id for message_id, reached in done.results.items() if reached is result]
        for result in EraseResult
    }
    mentions = None if done.mentions is None else [mention._asdict() for mention in done.mentions]
    return {**by_result, "mentions": mentions}


def _print_erasure(done: Erasure) -> None:
    for message_id, result in done.results.items():
        if result in _REASONS:
            print_error(f"message {message_id} {_REASONS[result]}")
    print_line(f"erased {pluralize(Counter(done.results.values())[EraseResult.ERASED], 'message')}")
    if done.mentions is None:
        print_note(
            "other rows may mention the owner or the address; as the owner of the schema, run: pgoutbox mentions"
        )
    elif done.mentions:
        print_note("these rows still mention them; decide about each:")
        print_table(Mention._fields, done.mentions)
