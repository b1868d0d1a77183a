"""E-mail of Django through the outbox: the backend enqueues in the caller's transaction, and a worker sends.

Without `deliver_with` the bytes that Django would send are stored, and sent by SMTP. With it, the fields of the e-mail
are stored, and the worker hands the same e-mail to another mailer.
"""

from __future__ import annotations

import base64
import email
import io
import logging
import re
import smtplib
import socket
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time
from email.charset import QP, Charset
from email.generator import BytesGenerator
from email.message import Message as MimeMessage
from email.mime.base import MIMEBase
from email.policy import compat32, default
from email.utils import format_datetime
from functools import cache
from typing import Any, Final

import django
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.mail.backends.base import BaseEmailBackend
from django.db import connections
from django.utils.functional import Promise
from django.utils.module_loading import import_string
from django.utils.timezone import is_naive, make_aware

from pgoutbox.contrib.django import conf, outbox
from pgoutbox.handlers import SyncContext
from pgoutbox.message import Message, Outcome, Permanent, Skip, Transient, Unavailable
from pgoutbox.observability.events import LogEvent
from pgoutbox.topics import NewMessage, Topic
from pgoutbox.transports.addresses import parse_mailbox, split_mailbox
from pgoutbox.transports.smtp.mail import RawEmail

_logger = logging.getLogger(__name__)

TOPIC: Final = "django.mail"
# One address, whether or not a mail server takes it: `root`, `"a b"@example.org`, `a@[127.0.0.1]`.
_ONE_ADDRESS: Final = re.compile(
    r"""(?:"(?:[^"\\]|\\.)*"|[^\s"<>@,;:()\[\]\\]+)(?:@(?:\[[^\s<>@,;\[\]\\]+\]|[^\s"<>@,;:()\[\]\\]+))?"""
)
# HTTP answers of a provider that concern the account or the moment, and not the e-mail.
_REFUSED_ACCOUNT: Final = frozenset({401, 402, 403})
_PASSING: Final = frozenset({408, 425, 429})
# Exceptions of Anymail about the e-mail. They have no status, and Anymail is not always installed.
_REFUSED_EMAIL: Final = frozenset(
    {"AnymailRecipientsRefused", "AnymailInvalidAddress", "AnymailUnsupportedFeature", "AnymailSerializationError"}
)
# smtplib's, before the e-mail is handed over.
_NO_SERVER: Final = (ConnectionRefusedError, socket.gaierror, smtplib.SMTPNotSupportedError)
_NO_SESSION: Final = (smtplib.SMTPAuthenticationError, smtplib.SMTPConnectError, smtplib.SMTPHeloError)
_FIELDS: Final = ("subject", "body", "from_email", "to", "cc", "bcc", "reply_to", "extra_headers", "content_subtype")
# Fields that are stored in another form, or belong to this process.
_OTHERS: Final = frozenset({"attachments", "alternatives", "connection", "anymail_status"})


class EmailBackend(BaseEmailBackend):
    """Enqueue each e-mail; all of one call commit together, with the caller's transaction if there is one.

    `deliver_with` names the mailer that sends it: an alias of MAILERS, or before Django 6.1 the path of a backend. Its
    default is PGOUTBOX["DELIVER_WITH"], and without it pgoutbox sends by SMTP.
    """

    def __init__(self, fail_silently: bool = False, *, deliver_with: str | None = None, **options: Any) -> None:  # noqa: ANN401, FBT001, FBT002 - Django's
        super().__init__(**options)
        self.fail_silently = fail_silently
        self._deliver_with = deliver_with or conf.deliver_with()

    def send_messages(self, email_messages: Iterable[Any]) -> int:
        """Enqueue the e-mails that have a recipient, and return their number.

        The first refused e-mail raises `ValueError` or `TypeError`, and none is enqueued. With `fail_silently` refused
        ones are logged, and the others are enqueued.
        """
        connection = connections[conf.alias()]
        emails = [one for one in email_messages if one.recipients()]
        if self.fail_silently:
            with conf.transaction_of(connection):
                return sum(self._is_enqueued(connection, one) for one in emails)
        drafts = [_draft(one, self._deliver_with) for one in emails]
        if drafts:
            with conf.transaction_of(connection):
                outbox.on(connection).enqueue_many(drafts)
        return len(drafts)

    def _is_enqueued(self, connection: Any, one: Any) -> bool:  # noqa: ANN401
        try:
            draft = _draft(one, self._deliver_with)
        except (TypeError, ValueError) as error:
            # Its text contains an address or a header.
            text = "an e-mail could not be enqueued; the caller continues without it: %s"
            event = {"event": LogEvent.ENQUEUE_FAILED.value, "topic": TOPIC, "error_type": type(error).__name__}
            _logger.error(text, type(error).__name__, extra=event)  # noqa: TRY400 - so does the traceback
            return False
        stored = outbox.on(connection).enqueue(TOPIC, draft.payload, **draft.options, best_effort=True)
        return stored is not None


@cache
def is_used() -> bool:
    """Whether the project sends by this backend. The answer is that of its start: tests replace the backend."""
    return any(map(_is_own, conf.mail_backends()))


def _is_own(path: str) -> bool:
    try:
        found = import_string(path)
    except ImportError:  # Django reports it when it sends an e-mail.
        return False
    return isinstance(found, type) and issubclass(found, EmailBackend)


def check(email_message: Any) -> None:  # noqa: ANN401
    """Refuse the e-mail if the backend does, and enqueue nothing."""
    if email_message.recipients():
        draft = _draft(email_message, conf.deliver_with())
        outbox.draft(TOPIC, draft.payload, **draft.options)


def _address(value: object) -> str:
    """Return the address of `Ann <ann@example.org>`. Raises `ValueError` if it is not one address."""
    try:
        _, address = split_mailbox("", str(value))
    except Permanent as refusal:
        raise ValueError(f"Invalid address {str(value)!r}{refusal}") from None
    if _ONE_ADDRESS.fullmatch(address) is None:
        raise ValueError(f"Invalid address {str(value)!r}: must be one address")
    try:
        return parse_mailbox("", address).address.addr_spec
    except Permanent:
        return address  # The worker ends it as failed, with the reason.


def _draft(message: Any, deliver_with: str | None) -> NewMessage[Any]:  # noqa: ANN401 - Django has no types
    recipients = [_address(one) for one in message.recipients()]
    destination = f"mailto:{recipients[0]}" if len(recipients) == 1 and "," not in recipients[0] else None
    if deliver_with is not None:
        payload: dict[str, Any] = {"deliver_with": deliver_with, "email": _fields_of(message)}
    else:
        data = _seven_bit(_bytes_of(message.message()))
        payload = {"sender": _address(message.from_email), "to": recipients, "data": data.decode("latin-1")}
    return NewMessage(TOPIC, payload, destination=destination)


# An e-mail has addresses, and often a link that signs its reader in.
outbox.define(Topic(TOPIC, redact=("data", "email", "to"), encrypted=conf.has_keys()))


@outbox.handler(TOPIC)
def deliver(message: Message[Any], ctx: SyncContext) -> RawEmail | Outcome | None:  # noqa: ARG001
    """Send by SMTP, or hand the e-mail to the mailer that it names."""
    payload = message.payload
    if "data" in payload:
        return RawEmail(data=payload["data"].encode("latin-1"), to=payload["to"], envelope_sender=payload["sender"])
    name = payload["deliver_with"]
    try:
        mailer = _mailer(name)
    except Exception as error:  # noqa: BLE001 - a mistake in the settings, which backends report in their own ways
        return Unavailable(f"deliver_with {name!r}: {type(error).__name__}: {error}")
    stored = _email_of(payload["email"])
    try:
        accepted = mailer.send_messages([stored])
    except Exception as error:
        if (outcome := _outcome_of(error)) is None:
            raise
        return outcome
    if accepted or accepted is None:  # Some backends return None.
        return None
    if hasattr(stored, "anymail_status") and not getattr(mailer, "fail_silently", False):
        return Skip("a receiver of Anymail's signal pre_send cancelled it")
    return Transient(f"deliver_with {name!r}: accepted no e-mail")


def _mailer(name: str) -> Any:  # noqa: ANN401
    mailer = mail.mailers[name] if name in getattr(mail, "mailers", ()) else mail.get_connection(name)
    if isinstance(mailer, EmailBackend):
        raise ImproperlyConfigured("it enqueues again")
    return mailer


def _outcome_of(error: Exception) -> Outcome | None:
    """Return the outcome of a refusal by the provider or the mail server. None: the attempt is repeated."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (ImproperlyConfigured, *_NO_SERVER, *_NO_SESSION)):
        return Unavailable(text)
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        codes = [code for code, _ in error.recipients.values()]
        return Permanent(text) if all(code >= 500 for code in codes) else None
    if isinstance(error, smtplib.SMTPResponseException):
        return Permanent(text) if error.smtp_code >= 500 else None
    if _REFUSED_EMAIL.intersection(kind.__name__ for kind in type(error).__mro__):
        return Permanent(text)
    status = getattr(error, "status_code", None)  # Anymail's.
    if status in _REFUSED_ACCOUNT:
        return Unavailable(text)
    if isinstance(status, int) and 400 <= status < 500 and status not in _PASSING:
        return Permanent(text)
    return None


# --- an e-mail as JSON ------------------------------------------------------------------------------------------------


class _Part(MIMEBase):
    """An attachment with headers of its own, as Django before 6.0 takes it. The parser adds the headers."""

    def __init__(self, policy: Any = compat32) -> None:  # noqa: ANN401 - the policy of the parser
        MimeMessage.__init__(self, policy)


def _fields_of(message: Any) -> dict[str, Any]:  # noqa: ANN401
    path = f"{type(message).__module__}.{type(message).__qualname__}"
    try:
        blank = import_string(path)()
    except (ImportError, TypeError) as error:
        raise TypeError(
            f"deliver_with: cannot store the e-mail class {path}: a worker must be able to import it and to call it "
            "without arguments; send an EmailMultiAlternatives, or leave deliver_with out"
        ) from error
    fields = {name: _plain(getattr(message, name)) for name in _FIELDS}
    headers = {name: fields[name] for name in ("subject", "from_email", "to", "cc", "reply_to")}
    headers["headers"] = {name: str(value) for name, value in fields["extra_headers"].items()}
    mail.EmailMessage(**headers).message()  # It refuses line breaks.
    fields["attachments"] = [_attachment(one) for one in message.attachments]
    fields["alternatives"] = [[*_content(content), kind] for content, kind in getattr(message, "alternatives", ())]
    known = {*_FIELDS, *_OTHERS}
    others = {
        name: _moment(value) if name == "send_at" else _plain(value)
        for name, value in vars(message).items()
        if name not in known and not name.startswith("_") and value is not getattr(blank, name, message)
    }
    return {"kind": path, "fields": fields, "others": others}  # Others are those of Anymail, such as tags.


def _email_of(stored: Mapping[str, Any]) -> Any:  # noqa: ANN401
    fields = dict(stored["fields"])
    attachments, alternatives = fields.pop("attachments"), fields.pop("alternatives")
    kind = import_string(stored["kind"])
    if not issubclass(kind, mail.EmailMessage):
        raise Permanent(f"email.kind: {stored['kind']} is not a class of e-mails")
    message = kind()
    for name, value in (fields | stored["others"]).items():
        setattr(message, name, value)
    for name, data, is_text, media_type in attachments:
        content = _content_of(data, is_text=is_text)
        if media_type is not None:
            message.attachments.append(mail.EmailAttachment(name, content, media_type))
        elif django.VERSION < (6, 0):
            message.attachments.append(email.message_from_bytes(content, _Part))
        else:
            message.attachments.append(email.message_from_bytes(content, policy=default))
    for data, is_text, media_type in alternatives:
        message.attach_alternative(_content_of(data, is_text=is_text), media_type)
    return message


def _attachment(attachment: Any) -> tuple[str | None, str, bool, str | None]:  # noqa: ANN401
    if isinstance(attachment, MimeMessage):
        return None, *_content(attachment), None
    name, content, media_type = attachment
    return _plain(name), *_content(content), media_type or "application/octet-stream"


def _content(content: Any) -> tuple[str, bool]:  # noqa: ANN401
    """Return the content as base64, and whether it is text."""
    if isinstance(content, mail.EmailMessage):
        content = content.message()
    if isinstance(content, MimeMessage):
        content = _bytes_of(content)
    is_text = isinstance(content, (str, Promise))
    return base64.b64encode(str(content).encode() if is_text else bytes(content)).decode(), is_text


def _content_of(data: str, *, is_text: bool) -> Any:  # noqa: ANN401
    content = base64.b64decode(data)
    return content.decode() if is_text else content


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Return texts for lazy translations and for the header Date. `enqueue` refuses values that are not JSON."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {
            str(name): format_datetime(one) if name == "Date" and isinstance(one, datetime) else _plain(one)
            for name, one in value.items()
        }
    return str(value) if isinstance(value, Promise) else value


def _moment(value: Any) -> Any:  # noqa: ANN401
    """Return a time as seconds since 1970, which Anymail accepts too."""
    if not isinstance(value, date):
        return value
    moment = value if isinstance(value, datetime) else datetime.combine(value, time())
    return (make_aware(moment) if is_naive(moment) else moment).timestamp()


def _bytes_of(message: MimeMessage) -> bytes:
    target = io.BytesIO()
    BytesGenerator(target, mangle_from_=False).flatten(message, linesep="\r\n")
    return target.getvalue()


def _seven_bit(data: bytes) -> bytes:
    """Return the e-mail for servers without 8BITMIME. Some filters against spam dislike text in base64."""
    message = email.message_from_bytes(data)
    for part in message.walk():
        if part.get("Content-Transfer-Encoding") == "8bit" and (charset := part.get_content_charset()) is not None:
            text = bytes(part.get_payload(decode=True)).decode(charset).replace("\r\n", "\n")
            quoted = Charset(charset)
            quoted.body_encoding = QP
            del part["Content-Transfer-Encoding"]
            part.set_payload(text, quoted)
    return data if data.isascii() else _bytes_of(message)
