"""The seam between a handler that renders and the transport that sends.

A handler returns a content (an `Email`, say). The transport registered for the scheme of the message's destination, or
for the content's own scheme where the message names no destination, sends it and classifies the answer as an outcome.
A transport never raises for what the receiver said: it returns `Transient` or `Permanent`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pgoutbox.message import Message, Outcome


@runtime_checkable
class Content(Protocol):
    """Something a handler returns to be sent. `scheme` names the transport when the message has no destination."""

    @property
    def scheme(self) -> str:
        """A URI scheme without the colon: `mailto`, `https` ..."""
        ...


class Transport(Protocol):
    """Sends contents to the destinations of some URI schemes. One instance serves one worker, on its event loop.

    While the setting `redirect_to` is given, contents go only to transports that have an attribute `redirect_to` of
    the same value, and thereby promise to hand nothing over to anybody else than the redirect says.
    """

    @property
    def schemes(self) -> tuple[str, ...]:
        """The URI schemes it serves, lower case, without the colon."""
        ...

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the content over once and say how it went.

        The hand-over carries `message.idempotency_key`, so that the receiver can recognise a repetition. A content or
        destination of the wrong form is `Permanent`, naming the field; cancellation passes through.
        """
        ...

    async def aclose(self) -> None:
        """Close what is open. Called once, when no send is under way."""
        ...


def scheme_of(destination: str) -> str:
    """The scheme of a destination URI, lower case: `mailto:a@b` gives `mailto`; empty when there is none."""
    scheme, colon, _ = destination.partition(":")
    return scheme.lower() if colon else ""
