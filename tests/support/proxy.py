"""A proxy to PostgreSQL that injects faults: it counts the statements of all connections and cuts the connection at the
n-th, stalls, delays, limits the bandwidth, or runs a statement of its own in a session.

It runs in a thread, so sync and async clients use it in the same way. A statement is one unit of server work: a simple
query; an Execute with the messages before it and the Sync behind it; or, without an Execute, everything up to the Sync
(Prepare). A cut connection is half closed: the proxy reads on until the server process has ended. After `wait_for_cut`
the tables therefore hold their final contents.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import psycopg.conninfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
_CANCEL_REQUEST = 80_877_102
_ASKS_FOR_ENCRYPTION = frozenset({80_877_103, 80_877_104})
_WORK = frozenset(b"QPBDEC")
_ANSWERS_TO_EXECUTE = frozenset(b"CIsE")
# A notification, a parameter status or a notice can arrive at any time, also between a statement and its answer.
_UNASKED = frozenset(b"ASN")


class Moment(enum.Enum):
    """When to cut the connection, relative to the n-th statement."""

    BEFORE = "before it reaches the server"
    SENT = "right after it was sent"
    REPLY_LOST = "when the server has executed it, and before its answer reaches the client"


class Direction(enum.Enum):
    """The direction of the bytes."""

    TO_SERVER = enum.auto()
    TO_CLIENT = enum.auto()


@dataclass(eq=False, slots=True)
class _Stall:
    """A time in which the proxy forwards nothing in the affected sessions."""

    application: str | None
    directions: frozenset[Direction]
    sessions: frozenset[_Session] | None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def holds(self, session: _Session, direction: Direction) -> bool:
        return (
            direction in self.directions
            and (self.application is None or session.application == self.application)
            and (self.sessions is None or session in self.sessions)
        )


@dataclass(eq=False, slots=True)
class _Hold:
    """Transactions of one application that stay open: their Sync, which commits them, is held back."""

    application: str
    is_reached: bool = False
    rolls_back: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """The address to connect to, the statements so far, and the faults to come. Any thread may call every method."""

    def __init__(self, dsn: str, listening: socket.socket) -> None:
        self._target = psycopg.conninfo.conninfo_to_dict(dsn)
        if listening.family == socket.AF_UNIX:
            directory, _, port = listening.getsockname().rpartition("/.s.PGSQL.")
            place = {"host": directory, "port": port}
        else:
            host, port = listening.getsockname()
            place = {"host": host, "port": str(port)}
        # One conninfo string, which every client of the tests can read. The proxy has no certificate.
        self.dsn = psycopg.conninfo.make_conninfo(dsn, **place, sslmode="disable", gssencmode="disable")
        self.statements: list[str] = []
        self.cancel_request_count = 0
        self.delay_seconds = 0.0
        self.bytes_per_second: float | None = None
        # Called in the proxy's thread with each statement, before any part of it is forwarded.
        self.on_statement: Callable[[str, str], None] = lambda application, text: None
        self._listening = listening
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._ready = threading.Event()
        self._sessions: dict[_Session, asyncio.Task[None]] = {}
        self._stalls: list[_Stall] = []
        self._hold: _Hold | None = None
        self._free_at = dict.fromkeys(Direction, 0.0)
        self._cut: tuple[int, Moment] | None = None
        self._cut_session: _Session | None = None
        self._cut_is_over = threading.Event()
        self._errors: list[BaseException] = []

    # --- faults -------------------------------------------------------------------------------------------------------

    def cut_at(self, number: int, moment: Moment) -> None:
        """Cut the connection of the n-th statement from now on, over all connections. The first is number 1."""

        def set_cut() -> None:
            self._cut_is_over.clear()
            self._cut_session = None
            self._cut = (len(self.statements) + number, moment)

        self._call(set_cut)

    def withdraw_cut(self) -> None:
        """Cut nothing more. The last cut has not happened."""

        def withdraw() -> None:
            self._cut = None

        self._call(withdraw)

    def has_cut(self) -> bool:
        """Return whether this many statements have arrived."""
        return self._call(lambda: self._cut is not None and len(self.statements) >= self._cut[0])

    def wait_for_cut(self) -> None:
        """Wait until the connection is cut and its server process has ended. Fail if the cut never happens."""
        if not self._cut_is_over.wait(PATIENCE_SECONDS):
            raise AssertionError(f"no cut at {self._cut} of {len(self.statements)} statements: {self.statements}")

    @contextlib.contextmanager
    def stalled(
        self,
        application: str | None = None,
        *,
        replies_only: bool = False,
        open_connections_only: bool = False,
    ) -> Iterator[None]:
        """Accept bytes but forward none, in the sessions of this application name or in all; forward them at the end.

        `replies_only`: statements still reach the server. `open_connections_only`: connections opened later are not
        affected."""
        directions = frozenset({Direction.TO_CLIENT} if replies_only else Direction)

        def begin() -> _Stall:
            stall = _Stall(application, directions, frozenset(self._sessions) if open_connections_only else None)
            self._stalls.append(stall)
            return stall

        def end() -> None:
            self._stalls.remove(stall)
            stall.over.set()

        stall = self._call(begin)
        try:
            yield
        finally:
            self._call(end)

    def hold_open(self, application: str) -> None:
        """Hold back the Sync of this application's transactions, so that they stay open with all that they have done.

        A transaction that is open already by `hold_open` is committed.
        """

        def begin() -> None:
            self._end_hold()
            self._hold = _Hold(application)

        self._call(begin)

    def is_holding(self) -> bool:
        """Return whether a whole transaction is in the server, or on its way, except for its Sync."""
        return self._call(lambda: self._hold is not None and self._hold.is_reached)

    def end_held(self, *, commits: bool) -> None:
        """Commit the transaction that is held open, or cut its connection, and hold no more."""
        self._call(lambda: self._end_hold(rolls_back=not commits))

    def _end_hold(self, *, rolls_back: bool = False) -> None:
        if self._hold is not None:
            self._hold.rolls_back = rolls_back
            self._hold.over.set()
            self._hold = None

    def hold_of(self, session: _Session) -> _Hold | None:
        """Return the hold on this session's transactions."""
        return self._hold if self._hold is not None and session.application == self._hold.application else None

    def slip_in(self, application: str, statement: str) -> int:
        """Run a statement in the open sessions of this application, like another client of a pooler. Return the number
        of sessions."""

        def slip() -> int:
            sessions = [session for session in self._sessions if session.application == application]
            for session in sessions:
                session.slip_in(statement)
            return len(sessions)

        return self._call(slip)

    def open_count(self, application: str) -> int:
        """Count the open connections of this application to the server."""
        return self._call(lambda: sum(session.application == application for session in self._sessions))

    # --- counting and stalling ----------------------------------------------------------------------------------------

    def begin_statement(self, application: str, text: str) -> Moment | None:
        """Count one more statement, and return the fault for it."""
        self.on_statement(application, text)
        self.statements.append(text)
        if self._cut is not None and self._cut[0] == len(self.statements):
            return self._cut[1]
        return None

    def note_cut(self, session: _Session) -> None:
        """Record that this session is being cut, so that others can continue."""
        self._cut_session = session

    def stall_of(self, session: _Session, direction: Direction) -> _Stall | None:
        """Return the stall that holds back this session's bytes."""
        return next((stall for stall in self._stalls if stall.holds(session, direction)), None)

    def due_at(self, direction: Direction, size: int) -> float:
        """Return the arrival time of the last byte on a line that all connections share."""
        now = self._loop.time()
        if self.bytes_per_second is None:
            return now + self.delay_seconds
        self._free_at[direction] = max(now, self._free_at[direction]) + size / self.bytes_per_second
        return self._free_at[direction] + self.delay_seconds

    # --- the thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to accept connections."""
        self._thread.start()
        self._ready.wait(PATIENCE_SECONDS)

    def stop(self) -> None:
        """Close every connection, end the thread, and raise its error if it had one."""
        self._call(self._stopped.set)
        self._thread.join(PATIENCE_SECONDS)
        if self._errors:
            raise self._errors[0]

    def _call(self, function: Callable[[], T]) -> T:
        if threading.current_thread() is self._thread:
            return function()

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        start = asyncio.start_unix_server if self._listening.family == socket.AF_UNIX else asyncio.start_server
        server = await start(self._accept, sock=self._listening)
        self._ready.set()
        await self._stopped.wait()
        server.close()
        for task in list(self._sessions.values()):
            task.cancel()
        await asyncio.gather(*self._sessions.values(), return_exceptions=True)

    async def _accept(self, client: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        session = _Session(self, client, client_writer)
        self._sessions[session] = asyncio.current_task()  # type: ignore[assignment] # a callback runs in a task
        try:
            await session.run(self._target)
        except asyncio.CancelledError:
            pass  # The proxy is being stopped.
        except Exception as error:  # noqa: BLE001 - `stop` raises it in the test
            self._errors.append(error)
        finally:
            await session.close()
            del self._sessions[session]
            if session is self._cut_session:
                self._cut_is_over.set()


class _Lane:
    """One direction of one connection: it forwards each chunk when it is due and nothing stalls."""

    def __init__(self, proxy: Proxy, session: _Session, direction: Direction, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._session = session
        self._direction = direction
        self._writer = writer
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._task = asyncio.create_task(self._forward())

    def put(self, data: bytes) -> None:
        """Queue these bytes to be forwarded in order."""
        self._queue.put_nowait((self._proxy.due_at(self._direction, len(data)), data))

    async def flush(self) -> None:
        """Wait until everything is forwarded."""
        await self._queue.join()

    async def stop(self) -> None:
        """Stop forwarding."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _forward(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_at, data = await self._queue.get()
            if (pause := due_at - loop.time()) > 0:
                await asyncio.sleep(pause)
            while (stall := self._proxy.stall_of(self._session, self._direction)) is not None:
                await stall.over.wait()
            with contextlib.suppress(OSError):  # The receiver is gone; its reader ends the session.
                self._writer.write(data)
                await self._writer.drain()
            self._queue.task_done()


class _Session:
    """One client connection and its connection to the server."""

    application = ""

    def __init__(self, proxy: Proxy, client: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = client
        self._client_writer = client_writer
        self._server_writer: asyncio.StreamWriter | None = None
        self._lanes: list[_Lane] = []
        self._prepared: dict[str, str] = {}
        # One ReadyForQuery answers each Sync or simple query, so counting them numbers the answers.
        self._asked_count = 0
        self._answered_count = -1  # The first ReadyForQuery ends the authentication.
        self._executed = Counter[int]()
        self._completed_count = 0
        self._hidden: set[int] = set()
        self._lost_from: int | None = None
        # A statement without an explicit transaction commits at its Sync, after the answer to Execute.
        self._is_lost_at_sync = True
        self._lost = asyncio.Event()

    async def run(self, target: Mapping[str, object]) -> None:
        """Forward in both directions until one side or a cut ends the session; nothing if the server is down."""
        host, port = str(target["host"]), str(target.get("port", 5432))
        try:
            if host.startswith("/"):
                server, server_writer = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
            else:
                server, server_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return  # The client loses its connection.
        self._server_writer = server_writer
        up = _Lane(self._proxy, self, Direction.TO_SERVER, server_writer)
        down = _Lane(self._proxy, self, Direction.TO_CLIENT, self._client_writer)
        self._lanes = [up, down]
        receiving = asyncio.create_task(self._from_server(server, down))
        sending = asyncio.create_task(self._from_client(up))
        try:
            await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                await down.flush()
            else:
                sending.result()
                # The server reads the bytes in transit, ends its transaction, and closes its end.
                await up.flush()
                with contextlib.suppress(OSError):
                    server_writer.write_eof()
            self._client_writer.close()
            await receiving
        finally:
            for task in (receiving, sending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def close(self) -> None:
        """Close both connections."""
        for lane in self._lanes:
            await lane.stop()
        for writer in (self._client_writer, self._server_writer):
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def slip_in(self, statement: str) -> None:
        """Send a simple query whose answer the client does not see."""
        self._asked_count += 1
        self._hidden.add(self._asked_count)
        body = statement.encode() + b"\0"
        self._lanes[0].put(b"Q" + struct.pack("!i", len(body) + 4) + body)

    # --- client to server ---------------------------------------------------------------------------------------------

    async def _from_client(self, up: _Lane) -> None:
        try:
            await self._start_up(up)
            moment: Moment | None = None
            in_statement = False
            while True:
                kind, body, message = await self._read(self._client)
                if kind in _WORK and not in_statement:
                    in_statement = True
                    moment = self._proxy.begin_statement(self.application, self._text_of(kind, body))
                    if moment is Moment.BEFORE:
                        self._proxy.note_cut(self)
                        return
                    if moment is not None:
                        self._lost_from = self._asked_count + 1
                if kind in b"S" and (hold := self._proxy.hold_of(self)) is not None:
                    await up.flush()
                    hold.is_reached = True
                    await hold.over.wait()
                    if hold.rolls_back:
                        return
                self._note_sent(kind, body)
                up.put(message)
                if not in_statement or kind not in b"QES":
                    continue
                in_statement = False
                if moment is not None:
                    await self._cut(kind, moment, up)
                    return
        except (asyncio.IncompleteReadError, OSError):
            return  # The client is gone.

    async def _start_up(self, up: _Lane) -> None:
        while True:
            head = await self._client.readexactly(8)
            length, code = struct.unpack("!ii", head)
            if code in _ASKS_FOR_ENCRYPTION:
                self._client_writer.write(b"N")
                continue
            body = await self._client.readexactly(length - 8)
            if code == _CANCEL_REQUEST:
                self._proxy.cancel_request_count += 1
            else:
                words = body.split(b"\0")
                parameters = dict(zip(words[::2], words[1::2], strict=False))
                name = parameters.get(b"application_name", b"").decode()
                self.application = " ".join(name.split(" ")[:2])  # Ignore the suffix with the worker's name.
            up.put(head + body)
            return

    async def _cut(self, kind: int, moment: Moment, up: _Lane) -> None:
        """Handle a cut at a statement in transit: forward its Sync, and its answer if the answer is to be lost."""
        has_sync = kind in b"QS"
        if not has_sync:
            kind, body, message = await self._read(self._client)
            has_sync = kind in b"S"
            if has_sync or kind in b"H":
                self._note_sent(kind, body)
                up.put(message)
        if moment is Moment.REPLY_LOST:
            if not has_sync:
                self._is_lost_at_sync = False
                up.put(b"H\0\0\0\4")  # In a pipeline, the server keeps its answer until a Sync or Flush.
            await self._lost.wait()
        await up.flush()
        self._proxy.note_cut(self)

    def _note_sent(self, kind: int, body: bytes) -> None:
        if kind in b"E":
            self._executed[self._asked_count + 1] += 1
        elif kind in b"QS":
            self._asked_count += 1
        elif kind in b"P":
            name, text, *_ = body.split(b"\0")
            self._prepared[name.decode()] = _one_line(text)

    def _text_of(self, kind: int, body: bytes) -> str:
        words = body.split(b"\0")
        if kind in b"Q":
            return _one_line(words[0])
        if kind in b"P":
            return _one_line(words[1])
        return self._prepared.get(words[1].decode() if kind in b"B" else "", chr(kind))

    # --- server to client ---------------------------------------------------------------------------------------------

    async def _from_server(self, server: asyncio.StreamReader, down: _Lane) -> None:
        try:
            while True:
                kind, _, message = await self._read(server)
                number = self._answered_count + 1
                is_lost = self._lost_from is not None and number >= self._lost_from
                if kind in _UNASKED or not (is_lost or number in self._hidden):
                    down.put(message)
                if kind in _ANSWERS_TO_EXECUTE:
                    self._completed_count += 1
                if is_lost and (kind in b"Z" if self._is_lost_at_sync else self._has_executed(kind, number)):
                    self._lost.set()
                if kind in b"Z":
                    self._answered_count += 1
                    self._completed_count = 0
        except (asyncio.IncompleteReadError, OSError):
            self._lost.set()  # The server is gone, and with it the answer.

    def _has_executed(self, kind: int, number: int) -> bool:
        return kind in b"E" or self._completed_count >= self._executed[number]

    async def _read(self, stream: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
        head = await stream.readexactly(5)
        kind, length = struct.unpack("!Bi", head)
        body = await stream.readexactly(length - 4)
        return kind, body, head + body


def _one_line(text: bytes) -> str:
    return " ".join(text.decode().split())[:120]


@contextlib.contextmanager
def proxy_to(dsn: str, listening: socket.socket | Path) -> Iterator[Proxy]:
    """Run a proxy to the server of this DSN, on a given listening socket or on a new one in a directory."""
    if not isinstance(listening, socket.socket):
        directory, listening = listening, socket.socket(socket.AF_UNIX)
        port = psycopg.conninfo.conninfo_to_dict(dsn).get("port", 5432)
        listening.bind(f"{directory}/.s.PGSQL.{port}")
        listening.listen()
    proxy = Proxy(dsn, listening)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
