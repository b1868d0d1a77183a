"""E-mail of Django through the outbox: the backend enqueues in the caller's transaction, and a worker sends.

Without `deliver_with` the bytes that Django would send are stored, and sent by SMTP. With it, the fields of the e-mail
are stored, and the worker hands the same e-mail to another mailer.
"""

from __future__ import annotations

import base64
import email
import io
import smtplib
from collections.abc import Iterable, Mapping
from email.generator import BytesGenerator
from email.message import Message as MimeMessage
from email.utils import getaddresses
from typing import Any, Final

from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.mail.backends.base import BaseEmailBackend
from django.db import connections, transaction

from pgoutbox.contrib.django import conf, outbox
from pgoutbox.handlers import SyncContext
from pgoutbox.message import Message, Outcome, Permanent, Transient, Unavailable
from pgoutbox.topics import NewMessage, Topic
from pgoutbox.transports.smtp import RawEmail

TOPIC: Final = "django.mail"
# HTTP answers of a provider that concern the account or the moment, and not the e-mail.
_REFUSED_ACCESS: Final = frozenset({401, 403})
_PASSING: Final = frozenset({408, 425, 429})
_KINDS: Final = {kind.__name__: kind for kind in (mail.EmailMessage, mail.EmailMultiAlternatives)}
_FIELDS: Final = ("subject", "body", "from_email", "to", "cc", "bcc", "reply_to", "extra_headers", "content_subtype")
# Fields that are stored in another form, or belong to this process.
_OTHERS: Final = frozenset({"attachments", "alternatives", "connection", "mixed_subtype", "alternative_subtype"})


class EmailBackend(BaseEmailBackend):
    """Enqueue each e-mail; all of one call commit together, with the caller's transaction if there is one.

    `deliver_with` names the mailer that sends it: an alias of MAILERS, or before Django 6.1 the path of a backend. Its
    default is PGOUTBOX["DELIVER_WITH"], and without it pgoutbox sends by SMTP.
    """

    def __init__(self, *arguments: Any, deliver_with: str | None = None, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **options)
        self._deliver_with = deliver_with or conf.deliver_with()

    def send_messages(self, email_messages: Iterable[Any]) -> int:
        """Enqueue the e-mails that have a recipient, and return their number."""
        database = conf.alias()
        drafts = [_draft(one, self._deliver_with) for one in email_messages if one.recipients()]
        if drafts:
            with transaction.atomic(using=database, savepoint=False):
                outbox.enqueue_many(connections[database], drafts)
        return len(drafts)


def _address(value: object) -> str:
    """Return the address of `Ann <ann@example.org>`. Raises `ValueError` unless it is exactly one, as Django does."""
    found = [address for _, address in getaddresses([str(value)])]
    if len(found) != 1 or not found[0]:
        raise ValueError(f"Invalid address {str(value)!r}: must be a single address")
    return found[0]


def _draft(message: Any, deliver_with: str | None) -> NewMessage[Any]:  # noqa: ANN401 - Django has no types
    recipients = [_address(one) for one in message.recipients()]
    destination = f"mailto:{recipients[0]}" if len(recipients) == 1 else None
    if deliver_with is not None:
        payload: dict[str, Any] = {"deliver_with": deliver_with, "email": _fields_of(message)}
    else:
        payload = {
            "sender": _address(message.from_email),
            "to": recipients,
            "data": _text_of(_bytes_of(message.message())),
        }
    return NewMessage(TOPIC, payload, destination=destination)


# An e-mail has addresses, and often a link that signs its reader in.
outbox.define(Topic(TOPIC, redact=("data", "email", "to"), encrypted=conf.has_keys()))


@outbox.handler(TOPIC)
def deliver(message: Message[Any], ctx: SyncContext) -> RawEmail | Outcome | None:  # noqa: ARG001
    """Send by SMTP, or hand the e-mail to the mailer that it names."""
    payload = message.payload
    if "data" in payload:
        return RawEmail(data=base64.b64decode(payload["data"]), to=payload["to"], envelope_sender=payload["sender"])
    name = payload["deliver_with"]
    try:
        mailer = _mailer(name)
    except Exception as error:  # noqa: BLE001 - a mistake in the settings, which backends report in their own ways
        return Unavailable(f"deliver_with {name!r}: {type(error).__name__}: {error}")
    try:
        accepted = mailer.send_messages([_email_of(payload["email"])])
    except Exception as error:
        if (outcome := _outcome_of(error)) is None:
            raise
        return outcome
    return None if accepted else Transient(f"deliver_with {name!r}: accepted no e-mail")


def _mailer(name: str) -> Any:  # noqa: ANN401
    mailer = mail.mailers[name] if name in getattr(mail, "mailers", ()) else mail.get_connection(name)
    if isinstance(mailer, EmailBackend):
        raise ImproperlyConfigured("it enqueues again")
    return mailer


def _outcome_of(error: Exception) -> Outcome | None:
    """Return the outcome of a refusal by the provider or the mail server. None: the attempt is repeated."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        codes = [code for code, _ in error.recipients.values()]
        return Permanent(text) if all(code >= 500 for code in codes) else None
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return Unavailable(text)
    if isinstance(error, smtplib.SMTPResponseException):
        return Permanent(text) if error.smtp_code >= 500 else None
    status = getattr(error, "status_code", None)  # Anymail's.
    if status in _REFUSED_ACCESS:
        return Unavailable(text)
    if isinstance(status, int) and 400 <= status < 500 and status not in _PASSING:
        return Permanent(text)
    return None


# --- an e-mail as JSON ------------------------------------------------------------------------------------------------


def _fields_of(message: Any) -> dict[str, Any]:  # noqa: ANN401
    kind = next((name for name, kind in _KINDS.items() if type(message) is kind), None)
    if kind is None:
        raise TypeError(
            f"deliver_with: cannot store the e-mail class {type(message).__name__}; "
            "send an EmailMessage or EmailMultiAlternatives, or leave deliver_with out"
        )
    fields = {name: _plain(getattr(message, name)) for name in _FIELDS}
    fields["attachments"] = [_attachment(one) for one in message.attachments]
    fields["alternatives"] = [[_plain(content), kind] for content, kind in getattr(message, "alternatives", ())]
    known = {*_FIELDS, *_OTHERS}
    others = {name: value for name, value in vars(message).items() if name not in known and not name.startswith("_")}
    return {"kind": kind, "fields": fields, "others": others}  # Others are those of Anymail, such as tags.


def _email_of(stored: Mapping[str, Any]) -> Any:  # noqa: ANN401
    fields = dict(stored["fields"])
    attachments, alternatives = fields.pop("attachments"), fields.pop("alternatives")
    message = _KINDS[stored["kind"]]()
    for name, value in (fields | stored["others"]).items():
        setattr(message, name, value)
    for name, content, kind in attachments:
        data = base64.b64decode(content)
        if kind is None:
            message.attach(email.message_from_bytes(data, policy=email.policy.default))
        else:
            message.attach(name, data.decode() if kind.startswith("text/") else data, kind)
    for content, kind in alternatives:
        message.attach_alternative(content, kind)
    return message


def _attachment(attachment: Any) -> tuple[str | None, str, str | None]:  # noqa: ANN401
    if isinstance(attachment, MimeMessage):
        return None, _text_of(_bytes_of(attachment)), None
    name, content, kind = attachment
    if isinstance(content, MimeMessage):
        content = content.as_bytes()
    data = content.encode() if isinstance(content, str) else bytes(content)
    return name, _text_of(data), kind or "application/octet-stream"


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Return text for what Django translates late."""
    if isinstance(value, (list, tuple)):
        return [str(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): str(one) for name, one in value.items()}
    return str(value)


def _bytes_of(message: MimeMessage) -> bytes:
    target = io.BytesIO()
    BytesGenerator(target, mangle_from_=False).flatten(message, linesep="\r\n")
    return target.getvalue()


def _text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()
