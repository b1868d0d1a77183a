"""The command `web`: checks the configured access, and serves the dashboard."""

from __future__ import annotations

import getpass
import ipaddress
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from pgoutbox.cli.arguments import load_outbox
from pgoutbox.cli.console import configure_logging, print_line, print_note, print_warning
from pgoutbox.cli.databases import load_database, serves_all
from pgoutbox.cli.options import App, DatabaseOptions, expanded
from pgoutbox.errors import ConfigurationError, NotReadyError, require_extra
from pgoutbox.settings import load_settings
from pgoutbox.unsubscribe import AsgiApp, asgi_app

if TYPE_CHECKING:
    from pgoutbox.dashboard.access import Access
    from pgoutbox.settings import Settings

web_app = typer.Typer(rich_markup_mode=None)

_PORT: Final = 8400


@web_app.callback(invoke_without_command=True)
@expanded
def web(
    context: typer.Context,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 means any free port.")] = _PORT,
    where: App = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve without sign-in. Only for a loopback address.")
    ] = False,
    role: Annotated[
        Literal["viewer", "operator"],
        typer.Option(metavar="viewer|operator", help="Role of everybody with --insecure."),
    ] = "viewer",
    place: DatabaseOptions,
) -> None:
    """Serve the dashboard, until SIGTERM or SIGINT.

    People sign in with the credentials in PGOUTBOX_WEB_VIEWER_TOKENS and PGOUTBOX_WEB_OPERATOR_TOKENS. With --app, it
    lists the application's topics, enqueues by their definitions, and hides the names that they redact. With many
    databases (PGOUTBOX_DSNS) it lists them first. With PGOUTBOX_UNSUBSCRIBE_URL, it also serves the links below the
    path of that address, without a sign-in.
    """
    if context.invoked_subcommand is not None:
        return
    settings = load_settings(app=where)
    outbox = load_outbox(settings.app) if settings.app is not None else None
    if not serves_all(settings, outbox, names_one=place.dsn is not None or place.database is not None):
        settings = load_database(place.dsn, place.database, app=where)
        settings.require_dsn()
    configure_logging(settings)
    require_extra("pgoutbox.dashboard.server", "the dashboard", "web")
    from pgoutbox.dashboard import create_app
    from pgoutbox.dashboard.server import Server

    access = _access_for(settings, host, insecure=insecure, role=role)
    pages: AsgiApp = create_app(outbox if outbox is not None else settings, settings=settings, access=access)
    if settings.unsubscribe.url is not None and settings.dsn is not None:
        pages = asgi_app(settings, otherwise=pages)
    try:
        server = Server(pages, settings, host=host, port=port, started=_print_url)
    except OSError as error:
        raise NotReadyError(f"--host {host} --port {port}: {error.strerror or error}") from None
    server.serve_until_stopped()


def _print_url(url: str) -> None:
    print_line(f"The dashboard is at {url}")
    sys.stdout.flush()


def _access_for(settings: Settings, host: str, *, insecure: bool, role: Literal["viewer", "operator"]) -> Access:
    from pgoutbox.dashboard.access import LOOPBACK_NAMES, Access

    is_local = _is_loopback(host)
    hosts = LOOPBACK_NAMES if is_local and settings.web.hosts is None else ()
    if insecure:
        if not is_local:
            raise ConfigurationError(
                f"--insecure: {host} is not a loopback address; use 127.0.0.1, or set PGOUTBOX_WEB_OPERATOR_TOKENS"
            )
        if settings.web.viewer_tokens is not None or settings.web.operator_tokens is not None:
            raise ConfigurationError("--insecure: PGOUTBOX_WEB_..._TOKENS is set; unset it, or omit --insecure")
        print_warning(f"no sign-in: everybody on this machine has the role {role}")
        return Access.open_to_all(role, settings, hosts=hosts)
    access = Access.from_settings(settings, hosts=hosts)
    if settings.web.secret is None:
        print_note("PGOUTBOX_WEB_SECRET is not set: sessions end when this process ends")
    return access


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        raise NotReadyError(f"--host {host}: not an address of this machine") from None
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


@web_app.command("hash-password")
def hash_password() -> None:
    """Print the hash of a password, for PGOUTBOX_WEB_VIEWER_TOKENS or PGOUTBOX_WEB_OPERATOR_TOKENS.

    Asks for the password on a terminal; otherwise reads one line from stdin.
    """
    require_extra("pgoutbox.dashboard.credentials", "the hash of a password", "web")
    from pgoutbox.dashboard import credentials

    if sys.stdin.isatty():
        password = getpass.getpass("Password: ")
        if getpass.getpass("Once more: ") != password:
            raise ConfigurationError("password: the two inputs differ")
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    print_line(credentials.hash_password(password))
