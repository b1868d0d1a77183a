"""The wire of webhooks: a connection that carries one request at a time.

h11 parses the answers, except for plain successes, of which only the status and the end matter.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import Sequence
from typing import Final

import h11

MAX_ANSWER_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 100 * 1024
_REST_SECONDS = 2.0

# `render` has checked the head of each request. To check it in h11 again takes a sixth of the time of an exchange.
_SENT: Final = h11.Request(method="POST", target="/", headers=[("Host", "")])
_SENT_WHOLE: Final = h11.EndOfMessage()

# Nothing in these header lines says where the body ends, or that the connection does not go on.
_LINES: Final = rb"(?i:(?:(?!content-length:|transfer-encoding:|connection:(?! keep-alive\r))[a-z0-9-]+:[ -~]*\r\n)*)"
# The head of a success, strict enough for h11 to read the same. To parse it there takes half the time of an exchange.
_PLAIN_SUCCESS: Final = re.compile(
    rb"HTTP/1\.1 (?:(20[0-3]) [ -~]*\r\n%b(?i:content-length): ([0-9]{1,4})\r\n%b|(204) [ -~]*\r\n%b)\r\n"
    % (_LINES, _LINES, _LINES)
)


class Answer:
    """The received part of an answer. `status` is None until its head is complete.

    A plain success has no headers and no body here.

    `ended` raises `OSError` if the connection is lost, `TimeoutError` if the time is up, and `EOFError` if the
    connection is closed or the answer is not HTTP.
    """

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self.status: int | None = None
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self.body = bytearray()
        self.ended = ended

    def header(self, name: bytes) -> str | None:
        """Return the first header of this name, which is given in lower case."""
        return next((value.decode("latin-1") for given, value in self.headers if given == name), None)


class Connection(asyncio.Protocol):
    """One connection to a host and port. It carries one exchange at a time, and is idle between two."""

    _transport: asyncio.Transport
    _poll: select.poll

    def __init__(self, origin: tuple[str, str, int]) -> None:
        self.origin = origin
        self.idle_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._answer: Answer | None = None
        self._is_plain = False
        self._until: asyncio.TimerHandle | None = None

    def send(self, request: bytes, *, until: float) -> Answer:
        """Send the request. The answer ends when it is complete, or as much of it as will be read.

        It ends at the time `until` of the event loop at the latest. Raises `ConnectionResetError` if the connection is
        lost, so that nothing was sent.
        """
        if self._transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._transport.write(request)
        self._is_plain = False
        self._answer = Answer(self._loop.create_future())
        self._until = self._loop.call_at(until, self._end, TimeoutError())
        return self._answer

    def is_silent(self) -> bool:
        """Whether this idle connection is open. Data before a request is not an answer to it, but an end."""
        return not self._transport.is_closing() and not self._poll.poll(0)

    def end_exchange(self) -> bool:
        """Return whether another request can follow."""
        self._end()
        self._answer = None
        self.idle_at = self._loop.time()
        if self._transport.is_closing():
            return False
        if not self._is_plain:
            is_complete = self._http.our_state is self._http.their_state is h11.DONE
            if not is_complete or self._http.trailing_data[0]:
                return False
            self._http.start_next_cycle()
        return self._transport.get_write_buffer_size() == 0

    def close(self) -> None:
        """Close at once, also during an exchange."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # a stream has a `Transport`
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._is_plain:  # Nobody asked for it.
            self.close()
            return
        if self._http.our_state is h11.IDLE:
            status = status_of_plain_success(data)
            if status is not None:
                self._is_plain = True
                self._answer.status = status
                self._end()
                return
            self._http.send(_SENT)
            self._http.send(_SENT_WHOLE)
        try:
            self._http.receive_data(data)
            self._read_events(self._answer)
        except h11.RemoteProtocolError:
            self._end(EOFError())

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or EOFError())

    def _read_events(self, answer: Answer) -> None:
        had_status = answer.status is not None
        while (event := self._http.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
            # For these classes, an `isinstance` that is false takes ten times as long.
            if type(event) is h11.Response:
                answer.status = event.status_code
                answer.headers = event.headers
            elif type(event) is h11.Data:
                answer.body += event.data
            if type(event) is h11.EndOfMessage or len(answer.body) > MAX_ANSWER_BYTES:
                self._end()
                return
        if answer.status is not None and not had_status and self._until is not None:
            until = min(self._until.when(), self._loop.time() + _REST_SECONDS)
            self._until.cancel()
            self._until = self._loop.call_at(until, self._end)

    def _end(self, error: Exception | None = None) -> None:
        if self._until is not None:
            self._until.cancel()
            self._until = None
        if self._answer is not None and not self._answer.ended.done():
            if error is None:
                self._answer.ended.set_result(None)
            else:
                self._answer.ended.set_exception(error)


def status_of_plain_success(data: bytes) -> int | None:
    """Return the status if the data is a whole plain success, and nothing more."""
    head = _PLAIN_SUCCESS.match(data)
    if head is None or len(data) - head.end() != int(head[2] or 0):
        return None
    return int(head[1] or head[3])
