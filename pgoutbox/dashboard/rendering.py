"""Rendering of templates. All values are escaped, and invisible characters are made visible."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, Final
from urllib.parse import urlencode

import anyio.to_thread
import jinja2
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from pgoutbox.dashboard import inputs, reads
from pgoutbox.dashboard.credentials import SESSION, VIEWER
from pgoutbox.operations import JsonText
from pgoutbox.operations.acts import DID
from pgoutbox.text import NAME, visible

ROOT: Final = "pgoutbox.root"
DATABASE: Final = "pgoutbox.database"
"""The name of the database of a request, if there are many."""
DASHBOARD: Final = "pgoutbox.dashboard"
"""Its dashboard."""
_ISO_TIME: Final = re.compile(r"(\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?\+\d\d:\d\d)")
_UNITS: Final = ((86_400 * 365, "y"), (86_400, "d"), (3_600, "h"), (60, "min"))


def link(request: Request, name: str, /, **path_params: object) -> str:
    """Return the path of a page with the mount prefix. Never absolute, so a forged Host header has no effect."""
    if DATABASE in request.scope and name != "static":
        path_params["database"] = request.scope[DATABASE]
    path: str = request.app.url_path_for(name, **path_params)
    return f"{request.scope[ROOT]}{path}"


def render(
    request: Request,
    template: str,
    context: Mapping[str, object],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> HTMLResponse:
    """Render a page. The template gets the context, `link`, `viewer` (None before sign-in) and `root`, the prefix.

    With many databases it gets the `database` of the page, or `is_of_all` if it belongs to none.
    """
    scope = request.scope
    known = {
        "link": partial(link, request),
        "root": scope[ROOT],
        "viewer": scope.get(VIEWER),
        "can_sign_out": SESSION in scope,
        "database": scope.get(DATABASE),
        "is_of_all": request.app.state.has_many and DATABASE not in scope,
    }
    text = _environment().get_template(template).render({**known, **context})
    # PostgreSQL cannot store a lone surrogate, but a query string can contain one.
    return HTMLResponse(text.encode("utf-8", "replace"), status_code=status, headers=headers)


def dashboard_in(request: Request) -> Any:  # noqa: ANN401 - its class needs this module
    """Return the dashboard of a request: that of its database, if there are many."""
    return request.scope.get(DASHBOARD) or request.app.state.dashboard


async def render_page(
    request: Request, template: str, context: Mapping[str, object], *, status: int = 200
) -> HTMLResponse:
    """Render a page in a thread, so that a long page does not block other requests. Each page warns of redirects
    and copies."""
    dashboard = dashboard_in(request)
    notices, totals = await dashboard.notices(), await dashboard.totals()
    own = {"totals": totals, "deployment": dashboard.settings.deployment, "done": request.query_params.get("done")}
    known = {**notices._asdict(), **own, **context}
    return await anyio.to_thread.run_sync(lambda: render(request, template, known, status=status))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pgoutbox.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_escape_invisible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number="{:,.0f}".format,
        upto=format_upto,
        seconds=format_seconds,
        utc=format_utc,
        times=mark_times,
        pretty=format_json,
        size=format_bytes,
    )
    environment.tests.update(
        queue_name=NAME.fullmatch,
        topic_name=NAME.fullmatch,
        field_text=_is_field_text,
        json_text=lambda value: isinstance(value, JsonText),
    )
    environment.globals.update(query=query, ago=format_ago, reads=reads, inputs=inputs, DID=DID)
    return environment


def _is_field_text(value: str) -> bool:
    """Whether a form sends this value of a field as it is: pages escape some characters, and browsers change others."""
    return visible(value) == value and not {"\n", "\r"}.intersection(value)


def _escape_invisible(value: Any) -> Any:  # noqa: ANN401 - Jinja passes the value of any expression
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return visible(value)


def query(*parameters: Mapping[str, object], **more: object) -> str:
    """Build a query string with `?`. Later parameters replace earlier ones; None omits a parameter."""
    merged = {name: value for given in (*parameters, more) for name, value in given.items()}
    return f"?{urlencode({name: value for name, value in merged.items() if value is not None}, doseq=True)}"


def format_upto(value: int, cap: int) -> str:
    """Format a count that was capped at `cap`.

    >>> format_upto(10001, 10000)
    '10,000+'
    """
    return f"{cap:,}+" if value > cap else f"{value:,}"


def format_seconds(value: float) -> str:
    """Format a duration in a readable unit.

    >>> [format_seconds(value) for value in (0.0042, 0.9996, 3.21, 75, 7300, 200000)]
    ['4.2 ms', '1 s', '3.21 s', '1 min', '2 h', '2 d']
    """
    if value < 0.9995:
        return f"{max(value, 0) * 1000:.3g} ms"
    for size, unit in _UNITS:
        if value >= size:
            return f"{value // size:.0f} {unit}"
    return f"{value:.3g} s" if value < 10 else f"{value:.0f} s"


def format_ago(moment: datetime, now: datetime) -> str:
    """Format a time relative to the clock of the database."""
    seconds = (now - moment).total_seconds()
    if abs(seconds) < 1:
        return "just now"
    distance = format_seconds(abs(seconds)) if abs(seconds) >= 60 else f"{abs(seconds):.0f} s"
    return f"{distance} ago" if seconds > 0 else f"in {distance}"


def format_bytes(size: int) -> str:
    """Format a size in a readable unit.

    >>> [format_bytes(size) for size in (0, 1023, 65536, 157286400)]
    ['0 bytes', '1,023 bytes', '64 KiB', '150 MiB']
    """
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.0f} {name}"
    return f"{size:,} bytes"


def format_utc(moment: datetime) -> str:
    """Format a time in UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def mark_times(text: object) -> Markup:
    """Show the ISO 8601 times of a text as elements, in UTC.

    >>> str(mark_times("since 2026-11-24T08:51:43+01:00"))
    'since <time datetime="2026-11-24T08:51:43+01:00">2026-11-24 07:51:43 UTC</time>'
    """

    def mark(found: re.Match[str]) -> str:
        try:
            shown = format_utc(datetime.fromisoformat(found[0]))
        except (ValueError, OverflowError):
            return found[0]
        return f'<time datetime="{found[0]}">{shown}</time>'

    return Markup(_ISO_TIME.sub(mark, escape(_escape_invisible(str(text)))))  # noqa: S704 - the text is escaped


def format_json(value: object) -> str:
    """Format JSON with indentation."""
    if isinstance(value, JsonText):
        return value
    return json.dumps(value, ensure_ascii=False, indent=2)
