"""Server verification of the transports: always both the certificate and the host name."""

from __future__ import annotations

import ssl
from typing import Final

from pgoutbox.errors import ConfigurationError, NotReadyError

_MAX_SESSIONS: Final = 100
IS_IT_TLS: Final = "does the server speak TLS on this port?"


def verifying_context(*, variable: str | None = None, ca_file: str | None = None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 or newer, which verifies certificate and host name by the CAs of system and file.

    Raises `NotReadyError`, naming the `variable` that the file comes from, if it cannot be read.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise NotReadyError(f"{variable}={ca_file!r}: {error}") from None
    return context


def client_context(
    server: str, ca_file: str | None, setting: str, with_tls: str, *, has_tls: bool, given: ssl.SSLContext | None = None
) -> ssl.SSLContext | None:
    """Return the `given` context, or else a verifying one if the connection has TLS.

    `setting` of the `server` decides on TLS. A CA file implies TLS, so it is refused for plain text.
    """
    variable = f"PGOUTBOX_{server}_CA_FILE"
    if ca_file is not None and not has_tls:
        raise ConfigurationError(
            f"{variable} is set, but PGOUTBOX_{server}_{setting} asks for plain text; use {with_tls}"
        )
    return given or (verifying_context(variable=variable, ca_file=ca_file) if has_tls else None)


def resume_sessions(context: ssl.SSLContext) -> None:
    """Resume the last session with the same host, which spares both sides the certificate and its verification."""
    last: dict[str | None, ssl.SSLObject] = {}  # A server sends tickets after the handshake.

    class Resuming(ssl.SSLObject):
        has_begun = False

        def do_handshake(self) -> None:
            if not self.has_begun and self.server_hostname in last:
                self.session = last[self.server_hostname].session
            self.has_begun = True
            super().do_handshake()  # Raises until it is complete, or if the certificate is refused.
            last[self.server_hostname] = self
            if len(last) > _MAX_SESSIONS:
                del last[next(iter(last))]

    context.sslobject_class = Resuming


def describe_refusal(error: BaseException) -> str | None:
    """Return the problem of a certificate, in OpenSSL's words; None for an error of another kind.

    Clients hide it behind their own errors. Some of these only report that connecting failed.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return f"the server's certificate is refused: {seen.verify_message}"
        if isinstance(seen, ssl.SSLError):
            return f"TLS: {(getattr(seen, 'reason', None) or str(seen)).replace('_', ' ').lower()}; {IS_IT_TLS}"
        seen = seen.__cause__ or seen.__context__
    return None
