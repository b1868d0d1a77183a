"""The e-mail and its bytes on the wire. Pure: opens nothing, needs no extra.

`render` refuses, naming the field, values that could become a second header, a second command or another recipient. It
never shortens a header or an address to make it valid.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.contentmanager import raw_data_manager
from email.header import Header
from email.headerregistry import Address, ContentTypeHeader
from email.message import EmailMessage
from email.policy import EmailPolicy, compat32
from email.utils import format_datetime
from functools import lru_cache
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
_MIME_VERSION = "MIME-Version: 1.0\r\n"

# This policy keeps headers as texts. `EmailPolicy` parses each one, which takes longer than the rest of an e-mail.
_UNFOLDED = compat32.clone(linesep="\r\n", cte_type="7bit")
_SHORT_FILENAME = re.compile(r"[A-Za-z0-9 ._()+-]{1,32}")


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
        _envelope_sender("email", self.envelope_sender)
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
        return cls(
            **templates.render(name, context)._asdict(),
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
        _envelope_sender("raw_email", self.envelope_sender)

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
    if email.sender is None:
        sender = _own_sender("email.sender", settings.smtp)
    else:
        sender = parse_mailbox("email.sender", email.sender)
    envelope_sender = _envelope_sender("email", email.envelope_sender, sender)
    to, cc, bcc = _recipients(email, message)
    originals: list[str] = []
    if redirect is not None:
        to, cc, bcc, originals = _redirected(redirect, message, to, cc, bcc)
    reply_to = _mailboxes("email.reply_to", email.reply_to)
    shown = [sender, *to, *cc, *reply_to]
    smtputf8_problem = _smtputf8_problem([*shown, *bcc, *envelope_sender])

    utf8 = smtputf8_problem is not None
    named = (("From", [sender]), ("To", to), ("Cc", cc), ("Reply-To", reply_to))
    head = [_address_header(name, boxes, utf8=utf8) for name, boxes in named if boxes]
    head.append(_header("Subject", email.subject, utf8=utf8, field="email.subject"))
    head.append(f"Date: {format_datetime(datetime.now(UTC))}\r\n".encode())
    # The sender's domain, because replicas have host names of their own, and the id must be the same from each of them.
    head.append(f"Message-ID: <{message.idempotency_key}@{sender.address.domain}>\r\n".encode())
    if originals:
        head.append(_header(_ORIGINAL_RECIPIENTS, ", ".join(originals), utf8=utf8))
    head.extend(_own_headers(email.headers, utf8=utf8))
    return RenderedEmail(
        sender="".join(_addresses(envelope_sender)),
        recipients=_addresses([*to, *cc, *bcc]),
        content=b"".join(head) + _body(email, utf8=utf8),
        smtputf8_problem=smtputf8_problem,
    )


def _render_raw(
    email: RawEmail, message: Message[object], settings: Settings, redirect: Redirect | None
) -> RenderedEmail:
    if email.envelope_sender is None:
        envelope_sender = [_own_sender("raw_email.envelope_sender", settings.smtp)]
    else:
        envelope_sender = _envelope_sender("raw_email", email.envelope_sender)
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
            data = _header(_ORIGINAL_RECIPIENTS, ", ".join(originals), utf8=False) + data
    return RenderedEmail(
        sender="".join(_addresses(envelope_sender)),
        recipients=_addresses(to),
        content=data,
        smtputf8_problem=smtputf8_problem or _smtputf8_problem([*to, *envelope_sender]),
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


def _own_sender(field: str, settings: SmtpSettings) -> Mailbox:
    """Return the sender of the settings, for an e-mail that has none in this field."""
    if settings.sender is None:
        raise Unavailable(f"{field}: none is given, and PGOUTBOX_SMTP_SENDER is not set")
    return parse_mailbox("PGOUTBOX_SMTP_SENDER", settings.sender)


def _envelope_sender(kind: str, value: object, *default: Mailbox) -> list[Mailbox]:
    """Return the address that gets bounces; empty if nobody gets them."""
    if value is None:
        return [*default]
    if value == "":
        return []
    box = parse_mailbox(f"{kind}.envelope_sender", value)
    if "<" in str(value):
        raise Permanent(f"{kind}.envelope_sender: must be an address without a name and without <>")
    return [box]


def _addresses(boxes: Sequence[Mailbox]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(box.address.addr_spec for box in boxes))


def _smtputf8_problem(boxes: Sequence[Mailbox]) -> str | None:
    field_name = next((box.field for box in boxes if not box.address.username.isascii()), None)
    return None if field_name is None else f"{field_name}: is not ASCII before @"


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


def address_of(message: Message[object]) -> str | None:
    """Return the address of a `mailto:` destination, without a name; None for another one. Raises `Permanent`."""
    boxes = _destination(message)
    return boxes[0].address.addr_spec if boxes else None


def _mailboxes(name: str, value: object) -> list[Mailbox]:
    if isinstance(value, str):
        return [parse_mailbox(name, value)]
    # The abstract class alone takes ten times as long.
    if not isinstance(value, (tuple, list, Sequence)) or isinstance(value, bytes):
        raise Permanent(f"{name}: must be an address or a sequence of addresses, not {type(value).__name__}")
    if len(value) > MAX_RECIPIENT_COUNT:
        raise Permanent(f"{name}: {len(value)} addresses are more than {MAX_RECIPIENT_COUNT}")
    return [parse_mailbox(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _own_headers(headers: Mapping[str, str], *, utf8: bool) -> Iterator[bytes]:
    for name, value in headers.items():
        where = f"email.headers[{name!r}]"
        if not _HEADER_NAME.fullmatch(name):
            raise Permanent(f"{where}: is not the name of a header")
        if name.lower() in _RESERVED_HEADERS or name.lower().startswith(_RESERVED_PREFIXES):
            raise Permanent(f"{where}: is set by pgoutbox, not by headers")
        yield _header(name, value, utf8=utf8, field=where)


def _body(email: Email, *, utf8: bool) -> bytes:
    """Return the headers of the content, and the content, as `EmailMessage` writes them by `email.policy.SMTP`."""
    texts = []
    for name, subtype, body in (("text", "plain", email.text), ("html", "html", email.html)):
        if body is not None:
            encode_text(f"email.{name}", body)  # It raises for a text that is not valid.
            texts.append(_text_part(subtype, body))
    part = texts[0] if len(texts) == 1 else _multipart("alternative", texts)
    files = _file_parts(email.attachments, utf8=utf8)
    return _multipart("mixed", [part, *files]) if files else part


@lru_cache(maxsize=4)  # The e-mails of a fan-out often have the same text and HTML.
def _text_part(subtype: str, body: str) -> bytes:
    part = EmailMessage(policy=_UNFOLDED)
    # A NUL is only legal in this encoding; for other texts the standard library chooses a readable one.
    cte = "base64" if "\0" in body else None
    part.set_content(body, subtype=subtype, cte=cte, content_manager=raw_data_manager)
    return _unfolded_headers(part) + str(part.get_payload()).replace("\n", "\r\n").encode("ascii")


def _file_parts(attachments: Sequence[Attachment], *, utf8: bool) -> list[bytes]:
    for index, attachment in enumerate(attachments):
        if not isinstance(attachment.content, bytes):
            raise Permanent(
                f"email.attachments[{index}].content: must be bytes, not {type(attachment.content).__name__}"
            )
    total = sum(len(attachment.content) for attachment in attachments)
    if total > MAX_ATTACHMENT_BYTES:
        raise Permanent(f"email.attachments: {total} bytes together are more than {MAX_ATTACHMENT_BYTES}")
    return [
        _file_headers(f"email.attachments[{index}]", attachment, utf8=utf8)
        + base64.encodebytes(attachment.content).replace(b"\n", b"\r\n")
        for index, attachment in enumerate(attachments)
    ]


def _file_headers(where: str, attachment: Attachment, *, utf8: bool) -> bytes:
    filename = header_text(f"{where}.filename", attachment.filename)
    media_type = _media_type(f"{where}.media_type", attachment.media_type)
    is_short = _SHORT_FILENAME.fullmatch(filename) and not media_type.params
    part = EmailMessage(policy=_UNFOLDED if is_short else EmailPolicy(linesep="\r\n", utf8=utf8))
    part.set_content(
        b"",
        maintype=media_type.maintype,
        subtype=media_type.subtype,
        filename=filename,
        disposition="attachment",
        params=dict(media_type.params),
        content_manager=raw_data_manager,
    )
    return _unfolded_headers(part) if is_short else part.as_bytes()


def _media_type(name: str, value: object) -> ContentTypeHeader:
    text = header_text(name, value)
    matched = _MEDIA_TYPE.fullmatch(text)
    if matched is None or matched["main"].lower() in {"multipart", "message"}:
        raise Permanent(f"{name}: is not the type of a file")
    header = EmailPolicy().header_factory("Content-Type", text)
    if header.defects:
        raise Permanent(f"{name}: has parameters that cannot be read")
    return cast("ContentTypeHeader", header)


def _unfolded_headers(part: EmailMessage) -> bytes:
    """Return the headers of a part, which are short or cannot be folded, and the empty line after them."""
    return "".join((*(f"{name}: {value}\r\n" for name, value in part.items()), "\r\n")).encode("ascii")


def _multipart(subtype: str, parts: Sequence[bytes]) -> bytes:
    boundary = f"=={secrets.token_hex(12)}"
    head = f'{_MIME_VERSION}Content-Type: multipart/{subtype}; boundary="{boundary}"\r\n'.encode()
    opening = f"\r\n--{boundary}\r\n".encode()
    # As in the standard library, the first part has no version: it was the e-mail before it became a part.
    first = parts[0].replace(_MIME_VERSION.encode(), b"", 1)
    return head + opening + opening.join((first, *parts[1:])) + f"\r\n--{boundary}--\r\n".encode()


def _header(name: str, value: object, *, utf8: bool, field: str = "") -> bytes:
    """Return a header. Raises `Permanent` with the field for a text that could become a second header."""
    folded = _fold_text(header_text(field or name, value), first_line_used=len(name) + 2, utf8=utf8)
    return f"{name}: {folded}\r\n".encode()


def _address_header(name: str, boxes: Sequence[Mailbox], *, utf8: bool) -> bytes:
    folded = ",\r\n ".join(_fold_mailbox(box.address, utf8=utf8) for box in boxes)
    return f"{name}: {folded}\r\n".encode()


def _fold_mailbox(address: Address, *, utf8: bool) -> str:
    # Some releases of the standard library lose the quotes of a display name at a fold.
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
    """Fold at white space, and encode only if necessary.

    The standard library encodes each word that is too long for a line. That breaks the URL of a List-Unsubscribe and
    the ids of References.
    """
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
