"""The dashboard: web pages that show the outbox and let operators change it.

An ASGI application. Serve it with `pgoutbox web`, or mount it in your own application. It needs the extra `web`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pgoutbox.errors import MissingExtraError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from pgoutbox.dashboard.access import Access, Viewer
    from pgoutbox.outbox import Outbox
    from pgoutbox.settings import Settings

__all__ = ["Access", "Viewer", "create_app"]


def create_app(
    source: Outbox | Settings, *, settings: Settings | None = None, access: Access | None = None
) -> Starlette:
    """Build the dashboard as an ASGI application. It connects to the database at the first request.

    From an outbox it takes the settings, unless `settings` are given, and the names that its topics redact. Without
    `access`, people sign in with the credentials of the settings; raises `ConfigurationError` if there are none. If you
    mount it, it detects the prefix of its links. With many databases the first page lists them, and each has its
    dashboard below its name:

        app = FastAPI()
        app.mount("/outbox", create_app(outbox))

    Call `app.state.dashboard.close()` when the host application ends. If served alone, it closes itself.
    """
    with _naming_the_extra():
        from pgoutbox.dashboard.app import build_app
    return build_app(source, settings=settings, access=access)


def __getattr__(name: str) -> object:
    if name not in ("Access", "Viewer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _naming_the_extra():
        from pgoutbox.dashboard import access
    return getattr(access, name)


@contextmanager
def _naming_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "pgoutbox":
            raise
        raise MissingExtraError("the dashboard", "web") from None
