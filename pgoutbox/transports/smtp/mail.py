"""The e-mail and its bytes on the wire. Pure: opens nothing, needs no extra.

`render` refuses, naming the field, values that could become a second header, a second command or another recipient. It
never shortens a header or an address to make it valid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.header import Header
from email.headerregistry import Address, AddressHeader, ContentTypeHeader
from email.message import EmailMessage
from email.policy import EmailPolicy
from email.utils import format_datetime
from typing import TYPE_CHECKING, Self, cast
from urllib.parse import unquote

from pgoutbox.message import Message, Permanent, Unavailable
from pgoutbox.transports import scheme_of
from pgoutbox.transports.addresses import Mailbox, header_text, parse_mailbox
from pgoutbox.transports.checks import encode_text

if TYPE_CHECKING:
    from pgoutbox.settings import Settings, SmtpSettings
    from pgoutbox.transports.redirect import Redirect
    from pgoutbox.transports.smtp.templates import Templates

MAX_RECIPIENT_COUNT = 1_000
MAX_ATTACHMENT_BYTES = 25 * 1024 * 1024
MAX_RAW_BYTES = 50 * 1024 * 1024
NO_SENDER = "email.sender: none is given, and PGOUTBOX_SMTP_SENDER is not set"
NO_ENVELOPE_SENDER = "raw_email.envelope_sender: none is given, and PGOUTBOX_SMTP_SENDER is not set"

# RFC 5322 allows 998 characters in a line. A longer word cannot be folded, only encoded.
_MAX_LINE_LENGTH = 998
_MAX_WORD_LENGTH = 900

_HEADER_NAME = re.compile(r"[!-9;-~]{1,76}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~ -]*")
# Some servers take a bare CR or LF for the end of a line. Then "LF . CR LF" ends the e-mail, and commands can follow.
_BARE_LINE_END = re.compile(rb"\r(?!\n)|(?<!\r)\n|\0")
_HEADER_START = re.compile(rb"[!-9;-~]+[ \t]*:")
_MEDIA_TYPE = re.compile(r"(?P<main>[A-Za-z0-9!#$&^_+-]+)/[A-Za-z0-9!#$&^_.+-]+(?:[ \t]*;.*)?")

_RESERVED_HEADERS = frozenset(
    {
        "bcc", "cc", "date", "dkim-signature", "from", "message-id", "mime-version", "orig-date",
        "received", "reply-to", "return-path", "sender", "subject", "to", "x-pgoutbox-original-to",
    }
)  # fmt: skip
_RESERVED_PREFIXES = ("content-", "resent-")
_ORIGINAL_RECIPIENTS = "X-Pgoutbox-Original-To"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file attached to an `Email`. `media_type` may have parameters: `text/calendar; method=REQUEST`."""

    filename: str
    content: bytes = field(repr=False)
    media_type: str = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Email:
    """An e-mail to be sent: return it from a handler.

    An address is one mailbox, `ann@example.com` or `Ann Lee <ann@example.com>`; several are a sequence, never one text
    with commas. The default of `to` is the message's `mailto:` destination, one address; the default of `sender` is the
    setting `smtp.sender`. `bcc` is only in the envelope. With both `text` and `html` the reader's program chooses.
    `headers` adds headers that pgoutbox does not set itself, for example `List-Unsubscribe`. `envelope_sender` is the
    address that gets bounces, by default the sender; the empty text sends no bounces, for automatic replies.

    If the server refuses one recipient, no recipient gets the e-mail.

    A wrong address, and an e-mail with neither `text` nor `html`, raise `Permanent` with the field. The rest is checked
    when the e-mail is sent.

    >>> Email(to="ann@example.com", subject="Welcome", text="Good to have you here.").scheme
    'mailto'
    """

    subject: str = field(repr=False)
    to: str | Sequence[str] | None = None
    text: str | None = field(default=None, repr=False)
    html: str | None = field(default=None, repr=False)
    sender: str | None = None
    cc: str | Sequence[str] = ()
    bcc: str | Sequence[str] = ()
    reply_to: str | Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    attachments: Sequence[Attachment] = ()
    envelope_sender: str | None = None

    def __post_init__(self) -> None:
        if self.sender is not None:
            parse_mailbox("email.sender", self.sender)
        if self.to is not None:
            _mailboxes("email.to", self.to)
        for name in ("cc", "bcc", "reply_to"):
            _mailboxes(f"email.{name}", getattr(self, name))
        _envelope_sender("email", self.envelope_sender, None)
        if self.text is None and self.html is None:
            raise Permanent("email.text: neither text nor html is given")

    @classmethod
    def from_template(
        cls,
        templates: Templates,
        name: str,
        context: Mapping[str, object],
        *,
        to: str | Sequence[str] | None = None,
        sender: str | None = None,
        cc: str | Sequence[str] = (),
        bcc: str | Sequence[str] = (),
        reply_to: str | Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        attachments: Sequence[Attachment] = (),
        envelope_sender: str | None = None,
    ) -> Self:
        """Return an e-mail with subject, text and HTML from templates, by `Templates.render`."""
        subject, text, html = templates.render(name, context)
        return cls(
            subject=subject,
            text=text,
            html=html,
            to=to,
            sender=sender,
            cc=cc,
            bcc=bcc,
            reply_to=reply_to,
            headers=headers or {},
            attachments=attachments,
            envelope_sender=envelope_sender,
        )

    @property
    def scheme(self) -> str:
        """`mailto`."""
        return "mailto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEmail:
    """An e-mail that is already encoded (RFC 5322), to be sent byte for byte: return it from a handler.

    Lines of `data` end in CR LF and have at most 998 bytes. pgoutbox reads and adds no header, neither a Message-ID nor
    a recipient: only `to` gets the e-mail. Its default is the message's `mailto:` destination. `envelope_sender` is the
    address that gets bounces, by default that of the setting `smtp.sender`. The empty text sends no bounces: use it for
    a bounce itself.

    Bytes beyond ASCII need a server with 8BITMIME, or with SMTPUTF8 if they are in the headers.

    A wrong address raises `Permanent` with the field. `data` is checked when the e-mail is sent.

    >>> RawEmail(data=b"Subject: Hello\\r\\n\\r\\nHi\\r\\n", to="ann@example.com").scheme
    'mailto'
    """

    data: bytes = field(repr=False)
    to: str | Sequence[str] | None = None
    envelope_sender: str | None = None

    def __post_init__(self) -> None:
        if self.to is not None:
            _mailboxes("raw_email.to", self.to)
        _envelope_sender("raw_email", self.envelope_sender, None)

    @property
    def scheme(self) -> str:
        """`mailto`."""
        return "mailto"


@dataclass(frozen=True, slots=True)
class RenderedEmail:
    """The envelope and the bytes of one e-mail, lines ending in CR LF.

    `sender` is that of the envelope; empty for an e-mail without bounces. `smtputf8_problem` names the field
    for which only a server with SMTPUTF8 accepts the e-mail. `is_8bit`: only a server with 8BITMIME accepts it.
    """

    sender: str
    recipients: tuple[str, ...]
    content: bytes = field(repr=False)
    smtputf8_problem: str | None
    is_8bit: bool = False


def render(
    email: Email | RawEmail, message: Message[object], settings: Settings, redirect: Redirect | None = None
) -> RenderedEmail:
    """Return the envelope and the bytes that would be sent for this message; connects to nothing.

    Raises `Permanent`, naming the field, for an invalid e-mail. A missing sender is `Unavailable`, because the setting
    `smtp.sender` adds it. A redirect during a blackout is `Postponed`, except for exempt recipients.
    """
    if isinstance(email, RawEmail):
        return _render_raw(email, message, settings, redirect)
    sender = _sender(email, settings.smtp)
    envelope_sender = _envelope_sender("email", email.envelope_sender, sender)
    to, cc, bcc = _recipients(email, message)
    originals: list[str] = []
    if redirect is not None:
        to, cc, bcc, originals = _redirected(redirect, message, to, cc, bcc)
    reply_to = _mailboxes("email.reply_to", email.reply_to)
    shown = [sender, *to, *cc, *reply_to]
    recipients = [*to, *cc, *bcc]
    smtputf8_problem = _smtputf8_problem([*shown, *bcc, *_listed(envelope_sender)])

    mime = EmailMessage(policy=_WirePolicy(linesep="\r\n", cte_type="7bit", utf8=smtputf8_problem is not None))
    mime["From"] = sender.address
    for name, boxes in (("To", to), ("Cc", cc), ("Reply-To", reply_to)):
        if boxes:
            mime[name] = tuple(box.address for box in boxes)
    mime["Subject"] = header_text("email.subject", email.subject)
    mime["Date"] = format_datetime(datetime.now(UTC))
    # The sender's domain, because replicas have host names of their own, and the id must be the same from each of them.
    mime["Message-ID"] = f"<{message.idempotency_key}@{sender.address.domain}>"
    if originals:
        mime[_ORIGINAL_RECIPIENTS] = ", ".join(originals)
    _add_headers(mime, email.headers)
    _add_body(mime, email)
    return RenderedEmail(
        sender=_address(envelope_sender),
        recipients=tuple(dict.fromkeys(box.address.addr_spec for box in recipients)),
        content=mime.as_bytes(),
        smtputf8_problem=smtputf8_problem,
    )


def _render_raw(
    email: RawEmail, message: Message[object], settings: Settings, redirect: Redirect | None
) -> RenderedEmail:
    default = None
    if email.envelope_sender is None:
        if settings.smtp.sender is None:
            raise Unavailable(NO_ENVELOPE_SENDER)
        default = parse_mailbox("PGOUTBOX_SMTP_SENDER", settings.smtp.sender)
    envelope_sender = _envelope_sender("raw_email", email.envelope_sender, default)
    to = _mailboxes("raw_email.to", email.to) if email.to is not None else _destination(message)
    if not to:
        raise Permanent("raw_email.to: no recipient, and the message has no destination with mailto")
    data = _checked_data(email.data)
    head = data.partition(b"\r\n\r\n")[0]
    smtputf8_problem = None if head.isascii() else "raw_email.data: has headers that are not ASCII"
    if redirect is not None:
        # These recipients are only in the envelope, like blind copies.
        _, _, to, originals = _redirected(redirect, message, [], [], to)
        if originals:
            data = _WirePolicy(utf8=False).fold_binary(_ORIGINAL_RECIPIENTS, ", ".join(originals)) + data
    return RenderedEmail(
        sender=_address(envelope_sender),
        recipients=tuple(dict.fromkeys(box.address.addr_spec for box in to)),
        content=data,
        smtputf8_problem=smtputf8_problem or _smtputf8_problem([*to, *_listed(envelope_sender)]),
        is_8bit=not data.isascii(),
    )


def _checked_data(data: object) -> bytes:
    """Return the encoded e-mail, its last line ended. Raises `Permanent` with the number of an invalid line."""
    where = "raw_email.data"
    if not isinstance(data, bytes):
        raise Permanent(f"{where}: must be bytes, not {type(data).__name__}")
    if len(data) > MAX_RAW_BYTES:
        raise Permanent(f"{where}: {len(data)} bytes are more than {MAX_RAW_BYTES}")
    if found := _BARE_LINE_END.search(data):
        what = {b"\r": "a bare CR", b"\n": "a bare LF", b"\0": "a NUL"}[found[0]]
        number = data.count(b"\n", 0, found.start()) + 1
        raise Permanent(
            f"{where}: line {number} has {what}; end each line with CR LF, for example by email.policy.SMTP"
        )
    if not data.endswith(b"\r\n"):
        data += b"\r\n"  # SMTP has no other form. DKIM signatures stay valid.
    lines = data.split(b"\r\n")
    if max(map(len, lines)) > _MAX_LINE_LENGTH:
        number, length = next((n, len(line)) for n, line in enumerate(lines, 1) if len(line) > _MAX_LINE_LENGTH)
        raise Permanent(f"{where}: line {number} has {length} bytes, the limit is {_MAX_LINE_LENGTH}; encode the body")
    for number, line in enumerate(lines[: lines.index(b"")], 1):
        if not (_HEADER_START.match(line) or (number > 1 and line.startswith((b" ", b"\t")))):
            raise Permanent(f"{where}: line {number} is not a header; a blank line must end the headers")
        try:
            line.decode()
        except UnicodeDecodeError:
            raise Permanent(f"{where}: line {number} is a header that is not UTF-8") from None
    if not lines[0]:
        raise Permanent(f"{where}: has no headers")
    return data


def _envelope_sender(kind: str, value: object, default: Mailbox | None) -> Mailbox | None:
    """Return the address that gets bounces. None: nobody gets them."""
    if value is None:
        return default
    if value == "":
        return None
    box = parse_mailbox(f"{kind}.envelope_sender", value)
    if "<" in str(value):
        raise Permanent(f"{kind}.envelope_sender: must be an address without a name and without <>")
    return box


def _address(box: Mailbox | None) -> str:
    return "" if box is None else box.address.addr_spec


def _listed(box: Mailbox | None) -> list[Mailbox]:
    return [] if box is None else [box]


def _smtputf8_problem(boxes: Sequence[Mailbox]) -> str | None:
    field_name = next((box.field for box in boxes if not box.address.username.isascii()), None)
    return None if field_name is None else f"{field_name}: is not ASCII before @"


def _sender(email: Email, settings: SmtpSettings) -> Mailbox:
    if email.sender is not None:
        return parse_mailbox("email.sender", email.sender)
    if settings.sender is None:
        raise Unavailable(NO_SENDER)
    return parse_mailbox("PGOUTBOX_SMTP_SENDER", settings.sender)


def _recipients(email: Email, message: Message[object]) -> tuple[list[Mailbox], list[Mailbox], list[Mailbox]]:
    to = _mailboxes("email.to", email.to) if email.to is not None else _destination(message)
    cc = _mailboxes("email.cc", email.cc)
    bcc = _mailboxes("email.bcc", email.bcc)
    count = len(to) + len(cc) + len(bcc)
    if count == 0:
        raise Permanent("email.to: no recipient, and the message has no destination with mailto")
    if count > MAX_RECIPIENT_COUNT:
        raise Permanent(f"email.to, cc, bcc: {count} recipients are more than {MAX_RECIPIENT_COUNT}")
    return to, cc, bcc


def _redirected(
    redirect: Redirect, message: Message[object], to: list[Mailbox], cc: list[Mailbox], bcc: list[Mailbox]
) -> tuple[list[Mailbox], list[Mailbox], list[Mailbox], list[str]]:
    """Return the recipients under the redirect, and the addresses of the replaced recipients."""
    exempt = [redirect.is_exempt(box) for box in (*to, *cc, *bcc)]
    if not all(exempt) and (refusal := redirect.refusal(message)) is not None:
        raise refusal
    # Recipients on the list can also read the header, and must not see the blind copies of others.
    is_for_testers_alone = not any(exempt)
    named = [*to, *cc, *bcc] if is_for_testers_alone else [*to, *cc]
    originals = [box.address.addr_spec for box in named if not redirect.is_exempt(box)]
    to, cc, bcc = ([redirect.apply(box) for box in boxes] for boxes in (to, cc, bcc))
    return to, cc, bcc, originals


def _destination(message: Message[object]) -> list[Mailbox]:
    """Return the address of a `mailto:` URI, if the destination is one.

    RFC 6068 allows several addresses and header fields. With both, the text of an address could add recipients.
    """
    if message.destination is None or scheme_of(message.destination) != "mailto":
        return []
    address, question_mark, _ = message.destination.partition(":")[2].partition("?")
    if question_mark:
        raise Permanent("destination: header fields after ? are not accepted")
    if "," in address:
        raise Permanent("destination: must name one recipient, without a comma; render Email(to=[...]) for several")
    return [parse_mailbox("destination", unquote(address, errors="surrogateescape"))]


def _mailboxes(name: str, value: object) -> list[Mailbox]:
    if isinstance(value, str):
        return [parse_mailbox(name, value)]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise Permanent(f"{name}: must be an address or a sequence of addresses, not {type(value).__name__}")
    if len(value) > MAX_RECIPIENT_COUNT:
        raise Permanent(f"{name}: {len(value)} addresses are more than {MAX_RECIPIENT_COUNT}")
    return [parse_mailbox(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _add_headers(mime: EmailMessage, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        where = f"email.headers[{name!r}]"
        if not _HEADER_NAME.fullmatch(name):
            raise Permanent(f"{where}: is not the name of a header")
        if name.lower() in _RESERVED_HEADERS or name.lower().startswith(_RESERVED_PREFIXES):
            raise Permanent(f"{where}: is set by pgoutbox, not by headers")
        mime[name] = header_text(where, value)


def _add_body(mime: EmailMessage, email: Email) -> None:
    parts = [("text", "plain", email.text), ("html", "html", email.html)]
    given = [(name, subtype, body) for name, subtype, body in parts if body is not None]
    for index, (name, subtype, body) in enumerate(given):
        encode_text(f"email.{name}", body)  # It raises for a text that is not valid.
        add = mime.add_alternative if index else mime.set_content
        # A NUL is only legal in this encoding; for other texts the standard library chooses a readable one.
        add(body, subtype=subtype, cte="base64" if "\0" in body else None)
    _add_attachments(mime, email.attachments)


def _add_attachments(mime: EmailMessage, attachments: Sequence[Attachment]) -> None:
    for index, attachment in enumerate(attachments):
        if not isinstance(attachment.content, bytes):
            raise Permanent(
                f"email.attachments[{index}].content: must be bytes, not {type(attachment.content).__name__}"
            )
    total = sum(len(attachment.content) for attachment in attachments)
    if total > MAX_ATTACHMENT_BYTES:
        raise Permanent(f"email.attachments: {total} bytes together are more than {MAX_ATTACHMENT_BYTES}")
    for index, attachment in enumerate(attachments):
        where = f"email.attachments[{index}]"
        filename = header_text(f"{where}.filename", attachment.filename)
        media_type = _media_type(f"{where}.media_type", attachment.media_type)
        mime.add_attachment(
            attachment.content,
            maintype=media_type.maintype,
            subtype=media_type.subtype,
            filename=filename,
            params=dict(media_type.params),
        )


def _media_type(name: str, value: object) -> ContentTypeHeader:
    text = header_text(name, value)
    matched = _MEDIA_TYPE.fullmatch(text)
    if matched is None or matched["main"].lower() in {"multipart", "message"}:
        raise Permanent(f"{name}: is not the type of a file")
    header = EmailPolicy().header_factory("Content-Type", text)
    if header.defects:
        raise Permanent(f"{name}: has parameters that cannot be read")
    return cast("ContentTypeHeader", header)


class _WirePolicy(EmailPolicy):
    """`email.policy.SMTP` with another folding of headers.

    The standard library turns a word that is too long for a line into encoded words. That breaks the URL of a
    List-Unsubscribe and the ids of References. Some of its releases lose the quotes of a display name at a fold.
    """

    def fold_binary(self, name: str, value: str) -> bytes:
        if name.lower().startswith(("content-", "mime-")):
            return super().fold_binary(name, value)
        if isinstance(value, AddressHeader):
            folded = ",\r\n ".join(_fold_mailbox(address, utf8=self.utf8) for address in value.addresses)
        else:
            folded = _fold_text(str(value), first_line_used=len(name) + 2, utf8=self.utf8)
        return f"{name}: {folded}\r\n".encode()


def _fold_mailbox(address: Address, *, utf8: bool) -> str:
    name = address.display_name
    if not name:
        return address.addr_spec
    if _PLAIN_NAME.fullmatch(name):
        phrase = _fold_text(name, first_line_used=10, utf8=utf8)
    elif (name.isascii() or utf8) and len(name) <= _MAX_WORD_LENGTH // 4:
        phrase = '"' + re.sub(r'(["\\])', r"\\\1", name) + '"'
    else:
        phrase = _encoded_words(name, first_line_used=10)
    return f"{phrase}\r\n <{address.addr_spec}>" if "\r\n" in phrase else f"{phrase} <{address.addr_spec}>"


def _fold_text(text: str, *, first_line_used: int, utf8: bool) -> str:
    """Fold at white space, and encode only if necessary."""
    pieces = re.findall(r"[ \t]*[^ \t]+", text)
    longest = max((len(piece.encode()) for piece in pieces), default=0)
    if longest > _MAX_WORD_LENGTH or not (text.isascii() or utf8):
        return _encoded_words(text, first_line_used=first_line_used)
    lines, used = [""], first_line_used
    for piece in pieces:
        if used + len(piece) > 78 and lines[-1] and piece[0] in " \t":
            lines.append("")
            used = 0
        lines[-1] += piece
        used += len(piece)
    return "\r\n".join(lines)


def _encoded_words(text: str, *, first_line_used: int) -> str:
    return Header(text, "utf-8", maxlinelen=75, header_name="x" * (first_line_used - 2)).encode(linesep="\r\n")
