"""The commands `prune` and `retention`."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Annotated, Final

import typer

from pgoutbox.cli.arguments import (
    Dsn,
    InTopic,
    Json,
    RuleState,
    RuleTopic,
    Yes,
    duration_option,
    format_keep,
    parse_final_state,
    parse_keep,
)
from pgoutbox.cli.console import print_json, print_line, print_note, print_result, print_table, progress
from pgoutbox.cli.program import app, confirm, interruptible, open_operator, read_settings
from pgoutbox.message import FINAL_STATES, State
from pgoutbox.operations import RetentionRule
from pgoutbox.operations.retention import PRUNED_BY_DEFAULT
from pgoutbox.text import pluralize

_COUNTED: Final = ("key_heads", "dedupe_keys", "acts", "partitions_dropped")

retention_app = typer.Typer(rich_markup_mode=None)
app.add_typer(retention_app, name="retention")


@app.command()
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
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete old final messages.

    Also deletes their attempts, payloads and dedupe keys, and commits each batch. Without --older-than, it applies the
    rules of `pgoutbox retention`.
    """
    if older_than is None and (states or topic):
        raise typer.BadParameter("--state and --topic need --older-than")
    settings = read_settings(dsn)
    chosen = frozenset(states or PRUNED_BY_DEFAULT)
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
    if as_json:
        deleted = {state.value: totals.messages.get(state, 0) for state in sorted(chosen)}
        print_json({"deleted": deleted} | {name: getattr(totals, name) for name in _COUNTED})
        return
    others = ((totals.partitions_dropped, "whole partition"), (totals.acts, "old act"))
    rest = "".join(f", and {pluralize(count, noun)}" for count, noun in others if count)
    print_line(f"{pluralize(totals.total, 'message')} deleted{rest}")


@retention_app.callback(invoke_without_command=True)
def retention(context: typer.Context, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """List the retention rules, by topic and state.

    Messages without a rule are kept forever. Workers and `pgoutbox prune` apply the rules. With --json one document per
    line.
    """
    context.obj = dsn
    if context.invoked_subcommand is not None:
        return
    with open_operator(read_settings(dsn), read_only=True) as operator:
        rules = operator.retention_rules()
    if as_json:
        for rule in rules:
            print_json(_rule_as_json(rule))
        return
    print_table(RetentionRule._fields, [(rule.topic, rule.state, format_keep(rule.keep)) for rule in rules])


@retention_app.command("set")
def set_retention(
    context: typer.Context,
    topic: RuleTopic,
    state: RuleState,
    keep: Annotated[str, typer.Argument(metavar="KEEP", help="Retention time, such as 30d; 0; or forever.")],
    *,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Set how long messages of a topic are kept in a state.

    Workers and `pgoutbox prune` delete messages after this time. With 0 for sent, workers delete each message when
    it is sent; this takes effect within a minute.
    """
    rule = RetentionRule(topic, state, parse_keep(keep))
    with open_operator(read_settings(dsn or context.obj)) as operator:
        operator.set_retention(*rule)
    print_result(_rule_as_json(rule), f"topic {topic}, {state}: kept {format_keep(rule.keep)}", as_json=as_json)


@retention_app.command("unset")
def unset_retention(
    context: typer.Context, topic: RuleTopic, state: RuleState, *, dsn: Dsn = None, as_json: Json = False
) -> None:
    """Remove a retention rule."""
    with open_operator(read_settings(dsn or context.obj)) as operator:
        unset = operator.unset_retention(topic, state)
    text = f"topic {topic}, {state}: {'rule removed' if unset else 'there was no rule'}"
    print_result({"topic": topic, "state": state, "unset": unset}, text, as_json=as_json)


def _rule_as_json(rule: RetentionRule) -> dict[str, object]:
    seconds = None if rule.keep is None else rule.keep.total_seconds()
    return {"topic": rule.topic, "state": rule.state, "keep_seconds": seconds}
