"""The receiver: a real SMTP server on loopback that records accepted e-mails, and refuses some mailboxes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes
from email.policy import default as default_policy

from pgoutbox.errors import MissingExtraError

GONE = "gone@example.net"
BUSY = "busy@example.net"
BUSY_REFUSALS = 2


@dataclass(frozen=True, slots=True)
class Receipt:
    """One accepted e-mail. `header` is its Message-ID; `received_at` is on the clock of `time.monotonic`."""

    message_id: int
    header: str
    recipient: str
    subject: str
    received_at: float


class Mailbox:
    """The record of the server. Written on the server's thread, read on the demo's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receipts: list[Receipt] = []
        self._busy_refusals = 0
        self._on_accepted: Callable[[Receipt, str], None] | None = None
        self.refusals: Counter[int] = Counter()

    def on_next_accepted(self, subject: str, act: Callable[[str], None]) -> None:
        """Call `act` with the name of the client that the next e-mail of this subject comes from, before its answer."""

        def act_once(receipt: Receipt, name: str) -> None:
            if receipt.subject == subject:
                self._on_accepted = None
                act(name)

        self._on_accepted = act_once

    @property
    def receipts(self) -> list[Receipt]:
        """The e-mails accepted so far, in order."""
        with self._lock:
            return list(self._receipts)

    @property
    def count(self) -> int:
        """The number of e-mails accepted so far."""
        return len(self._receipts)

    async def handle_RCPT(  # noqa: N802 - the name is aiosmtpd's
        self, _server: object, _session: object, envelope: object, address: str, _options: list[str]
    ) -> str:
        """Refuse one mailbox permanently, and another one at first."""
        with self._lock:
            if address == GONE:
                self.refusals[550] += 1
                return "550 5.1.1 no such mailbox"
            if address == BUSY and self._busy_refusals < BUSY_REFUSALS:
                self._busy_refusals += 1
                self.refusals[451] += 1
                return "451 4.3.2 busy, please try again"
        envelope.rcpt_tos.append(address)  # type: ignore[attr-defined] # aiosmtpd ships no types
        return "250 2.1.5 recipient accepted"

    async def handle_DATA(self, _server: object, session: object, envelope: object) -> str:  # noqa: N802
        """Record the e-mail."""
        parsed = message_from_bytes(envelope.content, policy=default_policy)  # type: ignore[attr-defined] # as above
        header = str(parsed["Message-ID"])
        receipt = Receipt(
            message_id=int(header.strip("<").partition("-")[0]),
            header=header,
            recipient=envelope.rcpt_tos[0],  # type: ignore[attr-defined] # as above
            subject=str(parsed["Subject"]),
            received_at=time.monotonic(),
        )
        with self._lock:
            self._receipts.append(receipt)
        if self._on_accepted is not None:
            self._on_accepted(receipt, session.host_name)  # type: ignore[attr-defined] # as above
        return "250 2.0.0 accepted"


@contextmanager
def open_mailbox() -> Iterator[tuple[Mailbox, int]]:
    """Run the server on a free port of the loopback interface; yield its record and the port."""
    try:
        from aiosmtpd.controller import Controller
    except ImportError as error:
        raise MissingExtraError("the demo", "demo") from error

    class AnyPort(Controller):
        """aiosmtpd checks that it listens by connecting to its given port. This port is known only afterwards."""

        def _trigger_server(self) -> None:
            self.port = self.server.sockets[0].getsockname()[1]  # type: ignore[union-attr] # it has started by now
            super()._trigger_server()  # type: ignore[no-untyped-call] # aiosmtpd is typed in part

    mailbox = Mailbox()
    controller = AnyPort(mailbox, hostname="127.0.0.1", port=0, ready_timeout=10)
    controller.start()
    try:
        yield mailbox, controller.port
    finally:
        controller.stop()
