"""Parsing of query parameters and form fields. An invalid one raises `ArgumentError`; the answer is 422."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, cast

from pydantic import JsonValue
from starlette.datastructures import ImmutableMultiDict
from starlette.exceptions import HTTPException
from starlette.requests import Request

from pgoutbox.dashboard.history import RANGES, Range
from pgoutbox.dashboard.reads import MAX_SHOWN
from pgoutbox.enqueue.payloads import from_json
from pgoutbox.errors import ArgumentError, MessageNotFoundError
from pgoutbox.message import State
from pgoutbox.operations import Correction, MessageFilter, Rate
from pgoutbox.operations.acts import ACTS, Act, ActArguments, ActName
from pgoutbox.operations.operator import SHARE_VALUES, ShareValue
from pgoutbox.options import MAX_DESTINATION_BYTES, MAX_ID, check_key, check_name
from pgoutbox.text import check_storable

MAX_LIMIT: Final = MAX_SHOWN
_USUAL_LIMIT: Final = 50
_MAX_TEXT: Final = 500
# The key of a circuit breaker can be a long URL.
MAX_KEY: Final = 2048
# The form of a bulk action has a field for each selected message.
_MAX_FIELDS: Final = MAX_LIMIT + 100
_FORM: Final = "pgoutbox.form"
UNIT_SECONDS: Final[Mapping[str, int]] = {"seconds": 1, "minutes": 60, "hours": 3_600, "days": 86_400}
PERIODS: Final[Mapping[str, int]] = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}
_MAX_PAUSE: Final = timedelta(days=3_650)

Given = ImmutableMultiDict[str, str]


async def read_form(request: Request) -> Given:
    """Return the fields of a form. They are read once, because the access check needs them too."""
    if _FORM not in request.scope:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        if has_body and kind != "application/x-www-form-urlencoded":
            raise HTTPException(415, "unsupported content type: send application/x-www-form-urlencoded")
        fields = await request.form(max_fields=_MAX_FIELDS)
        request.scope[_FORM] = Given([(name, str(value)) for name, value in fields.multi_items()])
    form: Given = request.scope[_FORM]
    return form


def text_of(given: Given, name: str, *, at_most: int = _MAX_TEXT) -> str | None:
    """Return a stripped text; None if empty."""
    value = given.get(name, "").strip()
    if not value:
        return None
    if len(value) > at_most:
        raise ArgumentError(name, f"longer than {at_most} characters")
    check_storable(name, value)
    return value


def number_of(given: Given, name: str, *, at_least: int = 1, at_most: int = MAX_ID) -> int | None:
    """Return a whole number; None if empty."""
    value = text_of(given, name)
    return None if value is None else _number(name, value, at_least=at_least, at_most=at_most)


def _number(name: str, value: str, *, at_least: int, at_most: int) -> int:
    if re.fullmatch(r"[0-9]{1,19}", value) is None or not at_least <= int(value) <= at_most:
        raise ArgumentError(name, f"give a whole number from {at_least} to {at_most}")
    return int(value)


def choice_of(given: Given, name: str, choices: Collection[str]) -> str | None:
    """Return one of the choices; None if empty."""
    value = given.get(name, "").strip()
    if value and value not in choices:
        raise ArgumentError(name, f"give one of {', '.join(choices)}")
    return value or None


def limit_of(given: Given) -> int:
    """Return the number of rows per page."""
    return number_of(given, "limit", at_most=MAX_LIMIT) or _USUAL_LIMIT


def time_of(given: Given, name: str) -> datetime | None:
    """Return a time from `<input type="datetime-local">`, in UTC unless it has an offset."""
    if (value := text_of(given, name)) is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ArgumentError(name, "give a time such as 2026-11-21T20:15, in UTC") from None
    if not 2000 <= moment.year < 9000:
        raise ArgumentError(name, "give a time between the years 2000 and 9000")
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)


def filter_of(given: Given) -> MessageFilter:
    """Return the message filter of a query string or a form."""
    try:
        states = [State(value) for value in given.getlist("state") if value]
    except ValueError:
        raise ArgumentError("state", f"unknown; give one of {', '.join(State)}") from None
    group = given.get("group", "").strip()
    if group and re.fullmatch(r"[0-9a-f]{12}", group) is None:
        raise ArgumentError("group", "unknown")
    return MessageFilter(
        states=tuple(dict.fromkeys(states)),
        topic=text_of(given, "topic"),
        queue=text_of(given, "queue"),
        destination=text_of(given, "destination"),
        owner=text_of(given, "owner"),
        key=text_of(given, "key"),
        text=text_of(given, "text"),
        created_from=time_of(given, "created_from"),
        created_before=time_of(given, "created_before"),
        error_group=group or None,
        breaker=text_of(given, "breaker", at_most=MAX_KEY),
        due=cast("Literal['now', 'later', 'again'] | None", choice_of(given, "due", ("now", "later", "again"))),
        ids=_ids_of(given),
    )


def _ids_of(given: Given) -> tuple[int, ...] | None:
    """Return the selected messages; None if the form has no selection. An empty one must not mean all messages."""
    if "ids" not in given:
        return None
    chosen = dict.fromkeys(value.strip() for value in given.getlist("ids") if value.strip())
    if not chosen:
        raise ArgumentError("ids", "select at least one message")
    if len(chosen) > MAX_LIMIT:
        raise ArgumentError("ids", f"select at most {MAX_LIMIT} messages")
    return tuple(_number("ids", value, at_least=1, at_most=MAX_ID) for value in chosen)


def asked_for(which: MessageFilter) -> dict[str, object]:
    """Return the query parameters of this filter."""
    parameters = which.given()
    group = parameters.pop("error_group", None)
    return {"state": parameters.pop("states", None), **parameters, "group": group}


def act_of(given: Given) -> Act:
    """Return the act on the messages of a list."""
    acts = {act.name: act for act in ACTS.values() if act.in_lists}
    if (act := acts.get(cast("ActName", given.get("do")))) is None:
        raise ArgumentError("do", f"give {' or '.join(acts)}")
    return act


def correction_of(form: Given) -> Correction:
    """Return the fields of a message to correct. An empty field stays as it is."""
    correction: dict[str, JsonValue] = {}
    for name in ("destination", "owner", "queue"):
        if (value := text_of(form, name, at_most=MAX_DESTINATION_BYTES)) is not None:
            correction[name] = value
    for name in ("payload", "headers"):
        if value := form.get(name, "").strip():
            # A lone surrogate is refused like any other invalid text.
            correction[name] = from_json(value.encode("utf-8", "surrogatepass"), name)
    if not correction:
        raise ArgumentError("destination", "change at least one field")
    return cast("Correction", correction)


def changes_of(form: Given, act: Act, *, of_one: bool = False) -> ActArguments:
    """Return the further arguments of an act. The form of one message must not leave a field empty."""
    changes: dict[str, object] = {}
    for argument in act.arguments:
        match argument.kind:
            case "duration":
                value: object = duration_of(form)
            case "time":
                value = time_of(form, argument.name)
            case _:
                value = text_of(form, argument.name)
        if value is None and (argument.required or (of_one and argument.name in form)):
            raise ArgumentError(argument.name, f"say {argument.hint}" if argument.kind == "text" else "must be given")
        changes[argument.name] = value
    return cast("ActArguments", changes)


def message_id_of(request: Request) -> int:
    """Return the id in the path. An id out of range is "not found"."""
    value = request.path_params["message_id"]
    if re.fullmatch(r"[0-9]{1,19}", value) is None or not 1 <= int(value) <= MAX_ID:
        raise MessageNotFoundError("no such message")
    return int(value)


def name_of(request: Request, kind: Literal["queue", "topic", "schedule"]) -> str:
    """Return the name of the queue, the topic or the schedule in the path."""
    return check_name(kind, request.path_params[kind])


def range_of(given: Given) -> Range:
    """Return the range of a chart."""
    return RANGES[choice_of(given, "range", RANGES) or next(iter(RANGES))]


def duration_of(form: Given, name: str = "duration", *, at_least: int = 1, unit: str = "minutes") -> timedelta | None:
    """Return the length of a pause, a redirect or a delay, in this unit if the form names none; None if empty."""
    count = number_of(form, name, at_least=at_least, at_most=1_000_000)
    unit = choice_of(form, "unit", UNIT_SECONDS) or unit
    if count is None:
        return None
    duration = timedelta(seconds=count * UNIT_SECONDS[unit])
    if duration > _MAX_PAUSE:
        raise ArgumentError(name, f"at most {_MAX_PAUSE.days} days")
    return duration


def names_of(form: Given, name: str) -> list[str]:
    """Return a list with commas."""
    return [one.strip() for one in (text_of(form, name) or "").split(",") if one.strip()]


def rate_of(form: Given) -> tuple[Rate | None, int | None]:
    """Return the rate and the burst of a queue; None means no limit, for which the form has a button."""
    if form.get("unlimited"):
        return None, None
    rate, burst = _rate_of(form), number_of(form, "burst", at_most=1_000_000)
    if rate is None and burst is not None:
        raise ArgumentError("burst", "give a rate too")
    return rate, burst


def _rate_of(form: Given) -> Rate | None:
    count = number_of(form, "rate", at_most=1_000_000)
    period = choice_of(form, "per", PERIODS) or "second"
    return None if count is None else Rate(count, PERIODS[period])


def key_of(given: Given, name: str) -> str:
    """Return a fair key, or its start, as it is: spaces belong to it."""
    key = given.get(name, "")
    return check_key(name, key) if key else ""


@dataclass(frozen=True, slots=True)
class Share:
    """A change of the share of a fair key; without a key, of that of its queue."""

    key: str | None
    weight: int | None = None
    max_in_flight: int | None = None
    rate: Rate | None = None
    remove: tuple[ShareValue, ...] = ()


def share_of(form: Given) -> Share:
    """Return a fair key and its new values. The form has buttons to pause it, to remove a value, and to reset all."""
    key = key_of(form, "key") or None
    do = choice_of(form, "do", ("set", "pause", "reset", *SHARE_VALUES)) or "set"
    weight = number_of(form, "weight", at_most=1_000)
    most = number_of(form, "in_flight", at_least=0, at_most=1_000_000)
    rate = _rate_of(form)
    given = {"weight": weight, "max_in_flight": most, "rate": rate}
    if do == "set" and all(value is None for value in given.values()):
        raise ArgumentError("weight", "give a weight, a limit in flight or a rate")
    refused = given if do == "reset" else ("max_in_flight",) if do == "pause" else (do,)
    for name, field in (("weight", "weight"), ("max_in_flight", "in_flight"), ("rate", "rate")):
        if name in refused and given[name] is not None:
            raise ArgumentError(field, "leave it empty, or press Set")
    removed = cast("tuple[ShareValue, ...]", (do,) if do in SHARE_VALUES else ())
    return Share(key, weight, 0 if do == "pause" else most, rate, removed)
