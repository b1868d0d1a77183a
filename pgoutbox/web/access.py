"""Who may use the dashboard, and what every request has to pass before a page sees it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

Role = Literal["viewer", "operator"]
Endpoint = Callable[[Request], Awaitable[Response]]

VIEWER_KEY: Final = "pgoutbox.viewer"
FORM_KEY: Final = "pgoutbox.form"


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who makes the request: `request.scope["pgoutbox.viewer"]`, on every page but the one for signing in."""

    name: str
    role: Role
    csrf_token: str = field(default="", repr=False)
    origin: str = ""


def operators_only(endpoint: Endpoint) -> Endpoint:
    """Answer 403 to everyone but operators."""

    @functools.wraps(endpoint)
    async def checked(request: Request) -> Response:
        if request.scope[VIEWER_KEY].role != "operator":
            raise HTTPException(403, "this needs the role operator")
        return await endpoint(request)

    return checked


class Access:
    """How people are told apart; see `protect`."""


def protect(app: ASGIApp, access: Access) -> ASGIApp:
    """The application behind the checks."""
    raise NotImplementedError
