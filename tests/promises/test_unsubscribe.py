"""The recipient of a mail of a list unsubscribes with one click, and nobody else does it."""

from __future__ import annotations

import asyncio
import io
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

import httpx
import psycopg
import pytest

from pgoutbox import (
    ConfigurationError,
    Context,
    Email,
    Message,
    Outbox,
    Sent,
    SyncContext,
    Topic,
    Worker,
    asend_directly,
)
from pgoutbox.dashboard import Access, create_app
from pgoutbox.operations import Operator
from pgoutbox.unsubscribe import asgi_app, wsgi_app
from tests.support.outbox_actions import enqueue, rows_of, running, settings_for
from tests.support.roles import login
from tests.support.smtp_server import accepting_server, mail_settings, parsed
from tests.support.waiting import until
from tests.support.web_server import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgoutbox import Settings
    from pgoutbox.operations import SuppressionReason
    from pgoutbox.unsubscribe import WsgiApp
    from tests.conftest import Connect

ADA: Final = "mailto:ada@example.org"
URL: Final = "https://club.example.org/unsubscribe"
KEY: Final = "a key of the tests with 32 characters"
OTHER_KEY: Final = "another key of the tests with 40 letters"
ONE_CLICK: Final = {"List-Unsubscribe": "One-Click"}


def settings_of(dsn: str, **settings: object) -> Settings:
    return settings_for(dsn, **{"unsubscribe_url": URL, "unsubscribe_keys": KEY, **settings})


async def link_to(dsn: str, destination: str = ADA, *, mailing_list: str = "news", **settings: object) -> str:
    """Return the token of a link that a handler gets."""
    outbox, links = Outbox(settings_of(dsn, **settings)), list[str]()

    @outbox.handler(Topic("mail", mailing_list=mailing_list))
    async def mail(message: Message, ctx: Context) -> None:
        links.append(ctx.unsubscribe_url)

    assert await asend_directly(outbox, "mail", None, destination=destination) == Sent()
    (link,) = links
    assert link.startswith(f"{URL}/")
    return link.removeprefix(f"{URL}/")


def suppressed(db: psycopg.Connection) -> list[tuple[str | None, str]]:
    """Return the lists and reasons of the suppressions in force."""
    return [(one.mailing_list, one.reason) for one in Operator(db).list_suppressions()]


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *_: object) -> None: ...  # noqa: A002 - the standard library's


@contextmanager
def serving_wsgi(app: WsgiApp) -> Iterator[str]:
    with make_server("127.0.0.1", 0, app, handler_class=_Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(params=["asgi", "wsgi"])
def client(request: pytest.FixtureRequest, dsn: str) -> Iterator[httpx.Client]:
    """Return a client of a server with the endpoint."""
    settings = settings_of(dsn)
    server = serving(asgi_app(settings)) if request.param == "asgi" else serving_wsgi(wsgi_app(settings))
    with server as url, httpx.Client(base_url=url) as opened:
        yield opened


async def post(client: httpx.Client, token: str, **given: object) -> int:
    """Post as mail programs do, and return the status."""
    form = given or {"data": ONE_CLICK}
    return (await asyncio.to_thread(client.post, token, **form)).status_code  # type: ignore[arg-type]


# --- the mail ---------------------------------------------------------------------------------------------------------


async def test_1000_queued_mails_and_one_click(dsn: str, db: psycopg.Connection) -> None:
    """She unsubscribes by the header of the first mail, while mails to her are pending, claimed and in flight."""
    async with accepting_server() as inbox:
        settings = settings_of(dsn, concurrency=10, batch_size=100, **mail_settings(inbox.port))
        outbox, begun, may_go_on = Outbox(settings), list[int](), asyncio.Event()

        @outbox.handler(Topic("news", mailing_list="news"))
        async def news(message: Message, ctx: Context) -> Email:
            begun.append(message.id)
            if len(begun) > 1:
                await may_go_on.wait()
            return Email(subject="News", text=f"Leave: {ctx.unsubscribe_url}")

        with db.transaction():
            outbox.on(db).enqueue_fanout("news", None, [ADA] * 1_000)
        with serving(asgi_app(settings)) as url, httpx.Client(base_url=url) as client:
            async with running(Worker(outbox)):
                await until(lambda: len(inbox.received) == 1 and len(begun) == 11)
                mail = parsed(inbox.received[0].content)
                assert mail["List-Unsubscribe-Post"] == "List-Unsubscribe=One-Click"
                link = str(mail["List-Unsubscribe"]).removeprefix("<").removesuffix(">")
                assert f"Leave: {link}" in mail.get_content().replace("=\n", "")
                assert await post(client, link.removeprefix(f"{URL}/")) == 200
                may_go_on.set()
                await until(lambda: all(row.is_finished for row in rows_of(db)))
    states = [row.state for row in rows_of(db)]
    assert len(begun) == 11
    # A hand-over asks again when its answer has grown old.
    assert states.count("sent") == len(inbox.received) == 1_000 - states.count("skipped")


async def test_only_a_mail_of_a_list_gets_the_headers_and_its_own_ones_stay(dsn: str, db: psycopg.Connection) -> None:
    async with accepting_server() as inbox:
        outbox = Outbox(settings_of(dsn, **mail_settings(inbox.port)))

        @outbox.handler(Topic("own", mailing_list="news"))
        async def own(message: Message, ctx: Context) -> Email:
            return Email(subject="own", text="t", headers={"list-unsubscribe": "<mailto:leave@example.org>"})

        @outbox.handler(Topic("half", mailing_list="news"))
        async def half(message: Message, ctx: Context) -> Email:
            return Email(subject="half", text="t", headers={"list-unsubscribe-post": "List-Unsubscribe=One-Click"})

        @outbox.handler("reset")
        def reset(message: Message, ctx: SyncContext) -> Email:
            with pytest.raises(ConfigurationError, match="needs a topic with a mailing_list"):
                _ = ctx.unsubscribe_url
            return Email(subject="reset", text="t")

        for topic in ("own", "half", "reset"):
            enqueue(db, topic, destination=ADA)
        await Worker(outbox).run_once()
    mails = {mail["Subject"]: mail for mail in (parsed(one.content) for one in inbox.received)}
    assert mails["own"].get_all("List-Unsubscribe") == ["<mailto:leave@example.org>"]
    assert mails["own"]["List-Unsubscribe-Post"] is None
    assert len(mails["half"].get_all("List-Unsubscribe-Post", [])) == 1  # Mail programs ignore both if there are two.
    assert mails["reset"]["List-Unsubscribe"] is None


# --- the click --------------------------------------------------------------------------------------------------------


async def test_a_get_shows_a_button_and_changes_nothing(client: httpx.Client, dsn: str, db: psycopg.Connection) -> None:
    token = await link_to(dsn)
    for method in ("GET", "HEAD"):
        page = await asyncio.to_thread(client.request, method, token)
        assert page.status_code == 200
        assert page.headers["Referrer-Policy"] == "no-referrer"
        assert page.headers["Cache-Control"] == "no-store"
        assert page.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
        assert "set-cookie" not in page.headers
        assert ('<button name="List-Unsubscribe" value="One-Click">' in page.text) is (method == "GET")
        assert "ada" not in page.text
    scanner = {"params": ONE_CLICK, "headers": {"X-HTTP-Method-Override": "POST"}}
    assert (await asyncio.to_thread(client.get, token, **scanner)).status_code == 200  # type: ignore[arg-type]
    opened = await asyncio.to_thread(client.request, "GET", token, data=ONE_CLICK)
    assert opened.status_code == 200
    assert suppressed(db) == []
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
        refused = await asyncio.to_thread(client.request, method, token)
        assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, HEAD, POST")
    assert suppressed(db) == []


PART: Final = b"--b\r\n%s\r\n\r\nOne-Click\r\n--b--\r\n"


@pytest.mark.parametrize(
    "form",
    [
        {"data": ONE_CLICK},
        {"files": {"List-Unsubscribe": (None, "One-Click")}},
        {"content": b"List-Unsubscribe=One-Click\r\n"},
        {"content": b"a=b&List-Unsubscribe=One-Click&c=d"},
        {"content": PART % b'Content-Disposition: form-data; name="List-Unsubscribe"; charset=utf-8'},
        {"content": PART % b"Content-Disposition: form-data; name=List-Unsubscribe\r\nContent-Type: text/plain"},
    ],
)
async def test_a_post_unsubscribes_once_for_all(
    client: httpx.Client, dsn: str, db: psycopg.Connection, form: dict[str, object]
) -> None:
    token = await link_to(dsn)
    answers = [await asyncio.to_thread(client.post, token, **form) for _ in range(2)]  # type: ignore[arg-type]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].text == answers[1].text
    assert suppressed(db) == [("news", "unsubscribe")]
    outbox = Outbox(settings_of(dsn))
    begun = []
    for mailing_list in ("news", "offers", None):

        @outbox.handler(Topic(f"mail.{mailing_list}".lower(), mailing_list=mailing_list))
        async def mail(message: Message, ctx: Context) -> None:
            begun.append(message.topic)

    for topic in outbox.topics:
        enqueue(db, topic, destination="mailto:ADA@example.org")
    await Worker(outbox).run_once()
    assert sorted(begun) == ["mail.none", "mail.offers"]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"data": {"List-Unsubscribe": "Two-Clicks"}},
        {"data": {"x-List-Unsubscribe": "One-Click"}},
        {"content": b"List-Unsubscribe=One-Click&" + b"x" * 5_000},
        {"json": ONE_CLICK},
    ],
)
async def test_a_post_without_the_field_is_refused(
    client: httpx.Client, dsn: str, db: psycopg.Connection, form: dict[str, object]
) -> None:
    token = await link_to(dsn)
    assert (await asyncio.to_thread(client.post, token, **form)).status_code == 400  # type: ignore[arg-type]
    assert suppressed(db) == []


def changed(token: str, place: int) -> str:
    """Return a token with another character."""
    other = "b" if token[place] == "a" else "a"
    return f"{token[:place]}{other}{token[place:][1:]}"


FORGERIES: Final[dict[str, Callable[[str], str]]] = {
    "nothing": lambda token: "",
    "another text": lambda token: "x" * len(token),
    "truncated": lambda token: token[:-4],
    "extended": lambda token: token + "AAAA",
    "another secret": lambda token: changed(token, 0),
    "another address": lambda token: changed(token, 20),
    "another time": lambda token: changed(token, 53),
    "another list": lambda token: changed(token, 54),
    "another signature": lambda token: changed(token, -1),
    "upper case": lambda token: token.upper(),
    "percent-encoded": lambda token: token.replace("~", "%257E"),
    "not ASCII": lambda token: "\u00e9" * 60,
    "very long": lambda token: "A" * 2_000,
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
async def test_a_forged_token_is_refused(
    client: httpx.Client, dsn: str, db: psycopg.Connection, forge: Callable[[str], str]
) -> None:
    token = await link_to(dsn)
    forged = forge(token)
    answers = [await asyncio.to_thread(client.request, method, forged, data=ONE_CLICK) for method in ("GET", "POST")]
    assert [answer.status_code for answer in answers] == [403, 403]
    assert len({answer.text for answer in answers}) == 1
    assert suppressed(db) == []


async def test_a_key_is_rotated_and_withdrawn(dsn: str, db: psycopg.Connection) -> None:
    token = await link_to(dsn)
    for keys, status in ((OTHER_KEY, 403), (f"{OTHER_KEY},{KEY}", 200)):
        app = asgi_app(settings_of(dsn, unsubscribe_keys=keys))
        with serving(app) as url, httpx.Client(base_url=url) as client:
            assert await post(client, token) == status
    assert suppressed(db) == [("news", "unsubscribe")]


async def test_a_link_of_before_she_subscribed_again_is_refused(
    client: httpx.Client, dsn: str, db: psycopg.Connection
) -> None:
    operator = Operator(db)
    old, of_another_list, of_otto = (
        await link_to(dsn),
        await link_to(dsn, mailing_list="offers"),
        await link_to(dsn, "mailto:otto@example.org"),
    )
    assert await post(client, old) == 200
    assert operator.unsuppress("ada@example.org", mailing_list="news")
    assert await post(client, old) == 410
    assert suppressed(db) == []
    assert [await post(client, token) for token in (of_another_list, of_otto)] == [200, 200]
    assert sorted(suppressed(db)) == [("news", "unsubscribe"), ("offers", "unsubscribe")]
    assert await post(client, await link_to(dsn)) == 200
    assert await post(client, old) == 200  # She is unsubscribed in any case.
    assert len(suppressed(db)) == 3


async def test_a_link_of_before_she_subscribed_is_refused(
    client: httpx.Client, dsn: str, db: psycopg.Connection
) -> None:
    """She was not suppressed: the application had removed her, for example."""
    old = await link_to(dsn)
    assert not Operator(db).unsuppress("ada@example.org", mailing_list="news")
    assert await post(client, old) == 410
    assert await post(client, await link_to(dsn)) == 200


async def test_a_link_of_another_database_with_the_same_keys_is_refused(
    client: httpx.Client, dsn: str, db: psycopg.Connection
) -> None:
    """It would say that she gets no more mail, and suppress nobody."""
    token = await link_to(dsn)
    db.execute("UPDATE pgoutbox.secret SET key = sha256(key)")
    assert await post(client, token) == 403
    assert suppressed(db) == []


async def test_the_answer_says_nothing_about_anybody(client: httpx.Client, dsn: str, db: psycopg.Connection) -> None:
    known, unknown = await link_to(dsn), await link_to(dsn, "mailto:otto@example.org")
    one: SuppressionReason
    for one in ("bounce", "complaint"):
        Operator(db).suppress("ada@example.org", one)
    for form in (None, ONE_CLICK):
        method = "GET" if form is None else "POST"
        answers = [await asyncio.to_thread(client.request, method, token, data=form) for token in (known, unknown)]
        assert answers[0].text == answers[1].text
        assert answers[0].status_code == answers[1].status_code == 200


async def test_without_the_database_the_click_can_be_repeated(
    client: httpx.Client, dsn: str, db: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    token = await link_to(dsn)
    db.execute("ALTER FUNCTION pgoutbox._unsubscribe RENAME TO away")
    answer = await asyncio.to_thread(client.post, token, data=ONE_CLICK)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "60")
    assert "away" not in answer.text
    (record,) = (record for record in caplog.records if record.name == "pgoutbox.unsubscribe")
    told = "a click could not be taken event=unsubscribe_failed error_type=UndefinedFunction sqlstate=42883"
    assert (record.levelname, record.getMessage()) == ("WARNING", told)
    assert token not in caplog.text
    db.execute("ALTER FUNCTION pgoutbox.away RENAME TO _unsubscribe")
    assert await post(client, token) == 200


async def test_an_open_transaction_about_the_same_address_delays_only_her_own_click(
    client: httpx.Client, dsn: str, db: psycopg.Connection
) -> None:
    token, of_otto = await link_to(dsn), await link_to(dsn, "mailto:otto@example.org")
    with db.transaction():
        Outbox().on(db).suppress("ada@example.org", "unsubscribe", mailing_list="news")
        assert await post(client, of_otto) == 200
        assert await post(client, token) == 503
    assert await post(client, token) == 200


async def test_many_clicks_at_once_have_few_connections(dsn: str, db: psycopg.Connection, connect: Connect) -> None:
    """A click that waits for too long is refused, and can be repeated."""
    tokens = [await link_to(dsn, f"mailto:ada{number}@example.org") for number in range(20)]
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgoutbox unsubscribe'"
    watch = connect(autocommit=True)
    with serving(asgi_app(settings_of(dsn))) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            with db.transaction():
                db.execute("LOCK TABLE pgoutbox.suppression IN EXCLUSIVE MODE")
                clicks = [asyncio.create_task(client.post(token, data=ONE_CLICK)) for token in tokens]
                await until(lambda: watch.execute(sessions).fetchone() == (4,))
                assert (await client.get(tokens[0])).status_code == 200
                assert watch.execute(sessions).fetchone() in [(number,) for number in range(5)]
            assert {(await click).status_code for click in clicks} <= {200, 503}
            assert {(await client.post(token, data=ONE_CLICK)).status_code for token in tokens} == {200}
    assert len(suppressed(db)) == 20


async def test_a_login_of_a_producer_serves_the_links(dsn: str, db: psycopg.Connection) -> None:
    token = await link_to(dsn)
    with login(dsn, "pgoutbox_producer") as producer:
        app = asgi_app(settings_of(producer))
        with serving(app) as url, httpx.Client(base_url=url) as client:
            assert await post(client, token) == 200
    assert suppressed(db) == [("news", "unsubscribe")]


# --- where it is served -----------------------------------------------------------------------------------------------


async def test_it_is_mounted_in_fastapi_and_flask(dsn: str, db: psycopg.Connection) -> None:
    import fastapi
    import flask
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    settings = settings_of(dsn)
    fast, slow = fastapi.FastAPI(), flask.Flask("club")
    fast.mount("/unsubscribe", asgi_app(settings))
    slow.wsgi_app = DispatcherMiddleware(slow.wsgi_app, {"/unsubscribe": wsgi_app(settings)})  # type: ignore[method-assign]
    for number, server in enumerate((serving(fast), serving_wsgi(slow))):
        token = await link_to(dsn, f"mailto:ada{number}@example.org")
        with server as url, httpx.Client(base_url=f"{url}/unsubscribe/") as client:
            assert (await asyncio.to_thread(client.get, token)).status_code == 200
            assert await post(client, token) == 200
            assert await post(client, changed(token, 20)) == 403
    assert suppressed(db) == [("news", "unsubscribe")] * 2


async def test_the_server_of_the_dashboard_serves_the_links_without_a_sign_in(dsn: str, db: psycopg.Connection) -> None:
    settings = settings_of(dsn, web_viewer_tokens="vera:0123456789abcdef0123456789abcdef")
    pages = create_app(settings, access=Access.from_settings(settings))
    token = await link_to(dsn)
    with serving(asgi_app(settings, otherwise=pages)) as url, httpx.Client(base_url=url) as client:
        assert (await asyncio.to_thread(client.get, "messages")).status_code in (303, 401)
        assert await post(client, f"unsubscribe/{token}") == 200
    assert suppressed(db) == [("news", "unsubscribe")]


def test_a_url_without_a_path_would_hide_the_other_pages(dsn: str) -> None:
    settings = settings_of(dsn, unsubscribe_url="https://leave.example.org/")
    pages = create_app(settings, access=Access.open_to_all("viewer", settings))
    with pytest.raises(ConfigurationError, match="PGOUTBOX_UNSUBSCRIBE_URL: needs a path"):
        asgi_app(settings, otherwise=pages)
    asgi_app(settings)


async def test_a_path_may_be_percent_encoded(dsn: str, db: psycopg.Connection) -> None:
    settings = settings_of(dsn, unsubscribe_url="https://club.example.org/k%C3%BCndigen")
    pages = create_app(settings, access=Access.open_to_all("viewer", settings))
    token = await link_to(dsn)
    with serving(asgi_app(settings, otherwise=pages)) as url, httpx.Client(base_url=url) as client:
        assert await post(client, f"k%C3%BCndigen/{token}") == 200
    assert suppressed(db) == [("news", "unsubscribe")]


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({"wsgi.input_terminated": True}, "200 OK"),  # A chunked body.
        ({"CONTENT_LENGTH": "26"}, "200 OK"),
        ({"CONTENT_LENGTH": "9" * 5_000}, "200 OK"),
        ({"CONTENT_LENGTH": "-1"}, "400 Bad Request"),
        ({}, "400 Bad Request"),
    ],
)
async def test_a_wsgi_server_may_not_know_the_length_of_a_body(
    dsn: str, db: psycopg.Connection, environ: dict[str, object], status: str
) -> None:
    told = []
    given = {"REQUEST_METHOD": "POST", "PATH_INFO": f"/{await link_to(dsn)}", **environ}
    given["wsgi.input"] = io.BytesIO(b"List-Unsubscribe=One-Click")
    wsgi_app(settings_of(dsn))(given, lambda status, *_: told.append(status))  # type: ignore[arg-type]
    assert told == [status]


def test_it_needs_keys(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="PGOUTBOX_UNSUBSCRIBE_KEYS is not set"):
        asgi_app(settings_for(dsn))
