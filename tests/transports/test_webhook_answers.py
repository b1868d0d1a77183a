"""Tests that a plain success is read as h11 reads it, whatever its bytes are."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given, settings, strategies

from pgoutbox.transports.webhook.connection import status_of_plain_success

NGINX = (
    b"HTTP/1.1 200 OK\r\nServer: nginx/1.29.4\r\nDate: Mon, 30 Nov 2026 20:00:00 GMT\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 2\r\nConnection: keep-alive\r\nStrict-Transport-Security: max-age=63072000\r\n\r\nok"
)
UVICORN = (
    b"HTTP/1.1 202 Accepted\r\ndate: Mon, 30 Nov 2026 20:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: 15\r\n"
    b'content-type: application/json\r\n\r\n{"status":"ok"}'
)
EXPRESS = (
    b"HTTP/1.1 204 No Content\r\nX-Powered-By: Express\r\nDate: Mon, 30 Nov 2026 20:00:00 GMT\r\n"
    b"Connection: keep-alive\r\nKeep-Alive: timeout=5\r\n\r\n"
)

LINES = [
    b"Server: nginx",
    b"X-Empty:",
    b"X-Spaces:  a \t",
    b"Content-Length: 0",
    b"content-length: 3",
    b"Content-Length:3",
    b"Content-Length: 03",
    b"Content-Length: 3, 3",
    b"Content-Length: -3",
    b"Content-Length : 3",
    b" Content-Length: 3",
    b"Transfer-Encoding: chunked",
    b"transfer-encoding: identity",
    b"Connection: keep-alive",
    b"Connection: close",
    b"Connection: keep-alive, close",
    b"Connection: upgrade",
    b"Upgrade: websocket",
    b"X-Folded: a\r\n b",
    b"X-Bare: a\nb",
    b"X-Bytes: \xc3\xa9\x00",
    b"no colon",
    b": no name",
]
STARTS = [
    b"HTTP/1.1 200 OK",
    b"HTTP/1.1 201 ",
    b"HTTP/1.1 202",
    b"HTTP/1.1 203 Non-Authoritative Information",
    b"HTTP/1.1 204 No Content",
    b"HTTP/1.1 205 Reset Content",
    b"HTTP/1.1 100 Continue",
    b"HTTP/1.1 400 Bad Request",
    b"HTTP/1.0 200 OK",
    b"http/1.1 200 OK",
    b"HTTP/1.1  200 OK",
]
BODIES = [b"", b"abc", b"abcd", b"\r\n", b"0\r\n\r\n", NGINX]


@strategies.composite
def answers(draw: strategies.DrawFn) -> bytes:
    lines = draw(strategies.lists(strategies.sampled_from(LINES), max_size=5))
    head = b"\r\n".join([draw(strategies.sampled_from(STARTS)), *lines])
    whole = bytearray(head + b"\r\n\r\n" + draw(strategies.sampled_from(BODIES)))
    if draw(strategies.booleans()):
        return bytes(whole)
    # One byte of it is another, is missing, or is there twice.
    at = draw(strategies.integers(0, len(whole) - 1))
    whole[at : at + 1] = draw(strategies.sampled_from([b"", whole[at : at + 1] * 2, b"\n", b"\r", b" ", b":", b"\x80"]))
    return bytes(whole)


def status_by_h11(data: bytes) -> int | None:
    """Return the status if h11 finds one whole answer, after which the connection can go on."""
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="POST", target="/", headers=[("Host", "")]))
    http.send(h11.EndOfMessage())
    http.receive_data(data)
    status = None
    try:
        while (event := http.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
            if isinstance(event, h11.Response):
                status = event.status_code
    except h11.RemoteProtocolError:
        return None
    goes_on = http.our_state is http.their_state is h11.DONE and not http.trailing_data[0]
    return status if goes_on else None


@settings(max_examples=500)
@given(answers())
@example(b"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\nabc")
@example(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 3\r\n\r\nabc")
@example(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 0\r\n\r\nabc")
@example(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n")
@example(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
@example(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive, close\r\n\r\n")
@example(b"http/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
@example(b"HTTP/1.1 204 No Content\r\n\r\nabc")
@example(NGINX + NGINX)
@example(NGINX[:-1])
def test_what_is_a_plain_success_here_is_a_whole_answer_for_h11(data: bytes) -> None:
    status = status_of_plain_success(data)
    assert status is None or status == status_by_h11(data)


@pytest.mark.parametrize(("answer", "status"), [(NGINX, 200), (UVICORN, 202), (EXPRESS, 204)])
def test_the_answers_of_usual_servers_are_plain(answer: bytes, status: int) -> None:
    assert status_of_plain_success(answer) == status
