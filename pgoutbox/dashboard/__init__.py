"""The dashboard: what is in the outbox, for people, and what they do to it by hand.

An ASGI application, to be served by `pgoutbox web` or mounted in an application of yours. It needs the extra `web`,
which is loaded when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgoutbox.errors import MissingExtraError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from pgoutbox.dashboard.access import Access
    from pgoutbox.outbox import Outbox
    from pgoutbox.settings import Settings

__all__ = ["create_app"]


def create_app(
    source: Outbox | Settings, *, settings: Settings | None = None, access: Access | None = None
) -> Starlette:
    """The dashboard as an ASGI application. Nothing is connected to before the first request.

    Of an outbox it takes the settings, unless `settings` are given, and the names that its topics hide. Without
    `access` people sign in with what the settings name; `ConfigurationError` if they name nobody. Mounted, it finds the
    prefix of its links by itself:

        app = FastAPI()
        app.mount("/outbox", create_app(outbox))

    Close it with `app.state.dashboard.close()` where the host application ends; served alone, it does so by itself.
    """
    try:
        from pgoutbox.dashboard.app import build_app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"anyio", "jinja2", "markupsafe", "starlette"}:
            raise
        raise MissingExtraError("the dashboard", "web") from None
    return build_app(source, settings=settings, access=access)
