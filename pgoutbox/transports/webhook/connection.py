"""The wire of webhooks: a connection that carries one request at a time. h11 parses the answers."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Sequence
from typing import Final

import h11

MAX_ANSWER_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 100 * 1024
_REST_SECONDS = 2.0

# `render` has checked the head of each request. To check it in h11 again takes a sixth of the time of an exchange.
_SENT: Final = h11.Request(method="POST", target="/", headers=[("Host", ""), ("Content-Length", "0")])


class Answer:
    """The received part of an answer. `status` is None until its head is complete.

    `ended` raises `OSError` if the connection is lost, and `EOFError` if it is closed or the answer is not HTTP.
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

    def __init__(self, origin: tuple[str, str, int]) -> None:
        self.origin = origin
        self.idle_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._answer: Answer | None = None
        self._rest: asyncio.TimerHandle | None = None

    def send(self, request: bytes) -> Answer:
        """Send the request. The answer ends when it is complete, or as much of it as will be read.

        Raises `ConnectionResetError` if the connection is lost, so that nothing was sent.
        """
        if self._transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._http.send(_SENT)
        self._http.send(h11.EndOfMessage())
        self._transport.write(request)
        self._answer = Answer(self._loop.create_future())
        return self._answer

    def is_silent(self) -> bool:
        """Whether this idle connection is open. Data before a request is not an answer to it, but an end."""
        if self._transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def end_exchange(self) -> bool:
        """Return whether another request can follow."""
        self._end()
        self._answer = None
        self.idle_at = self._loop.time()
        is_complete = self._http.our_state is self._http.their_state is h11.DONE
        if not is_complete or self._transport.is_closing() or self._http.trailing_data[0]:
            return False
        self._http.start_next_cycle()
        return self._transport.get_write_buffer_size() == 0

    def close(self) -> None:
        """Close at once, also during an exchange."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # a stream has a `Transport`

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # Nobody asked for it.
            self.close()
            return
        try:
            self._http.receive_data(data)
            self._read_events(self._answer)
        except h11.RemoteProtocolError:
            self._end(EOFError())

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or EOFError())

    def _read_events(self, answer: Answer) -> None:
        while not isinstance(event := self._http.next_event(), h11.NEED_DATA | h11.PAUSED):
            if isinstance(event, h11.Response):
                answer.status = event.status_code
                answer.headers = list(event.headers)
            elif isinstance(event, h11.Data):
                answer.body += event.data
            if isinstance(event, h11.EndOfMessage) or len(answer.body) > MAX_ANSWER_BYTES:
                self._end()
                return
        if answer.status is not None and self._rest is None:
            self._rest = self._loop.call_later(_REST_SECONDS, self._end)

    def _end(self, error: Exception | None = None) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._answer is None or self._answer.ended.done():
            return
        if error is None:
            self._answer.ended.set_result(None)
        else:
            self._answer.ended.set_exception(error)
