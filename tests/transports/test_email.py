"""Tests the MIME form of an `Email`, and the refusals before any connection."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from email import policy
from email.header import decode_header, make_header
from email.message import EmailMessage
from email.utils import formataddr, getaddresses, parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import aiosmtplib.email
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgoutbox.message import Permanent, Unavailable
from pgoutbox.settings import Settings, load_settings
from pgoutbox.transports import Content
from pgoutbox.transports.smtp.mail import MAX_ATTACHMENT_BYTES, MAX_RECIPIENT_COUNT, Attachment, Email, render
from tests.support.sends import outgoing
from tests.support.settings import settings_with
from tests.support.smtp_server import parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SETTINGS = settings_with(smtp_host="mx.test", smtp_sender="Club <club@example.org>")

SPECIALS = st.sampled_from('a ü"\\<>@,;:=?_.\t')
SAFE_TEXT = st.text(
    SPECIALS | st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\u2028\u2029"),
    min_size=1,
    max_size=300,
)


def rendered(
    email: Email, *, settings: Settings = SETTINGS, destination: str | None = None, attempt_count: int = 1
) -> EmailMessage:
    return parsed(render(email, outgoing(destination=destination, attempt_count=attempt_count), settings).content)


def refusal(email: Email | Callable[[], Email], *, destination: str | None = None) -> str:
    """Return the error of an e-mail that is refused when it is built or rendered."""
    with pytest.raises(Permanent) as caught:
        render(email() if callable(email) else email, outgoing(destination=destination), SETTINGS)
    return caught.value.error


def header_lines(content: bytes) -> list[bytes]:
    """Return the headers of the outermost part, unfolded."""
    block = content.partition(b"\r\n\r\n")[0]
    return re.sub(rb"\r\n(?=[ \t])", b"", block).split(b"\r\n")


def test_an_email_is_a_content_of_the_mailto_scheme() -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi")
    assert isinstance(email, Content)
    assert email.scheme == "mailto"


@pytest.mark.slow
def test_an_email_can_be_made_without_aiosmtplib() -> None:
    program = (
        "import sys; sys.modules['aiosmtplib'] = None\n"
        "from pgoutbox.errors import MissingExtraError\n"
        "from pgoutbox.settings import load_settings\n"
        "from pgoutbox import Email\n"
        "Email(to='ann@example.com', subject='Hello', text='Hi')\n"
        "from pgoutbox.transports.registry import build\n"
        "try: build('mailto', load_settings(smtp={'host': 'mx.test'}))\n"
        "except MissingExtraError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "the SMTP transport needs a package of the default installation: pip install pgoutbox\n"


def test_the_repr_shows_neither_subject_nor_body_nor_attachment() -> None:
    email = Email(
        to="ann@example.com",
        subject="canary",
        text="canary",
        html="canary",
        headers={"X-Tag": "canary"},
        attachments=[Attachment("a.txt", b"canary")],
    )
    assert "canary" not in repr(email)
    assert "canary" not in repr(render(email, outgoing(), SETTINGS))


def test_headers_and_text_reach_the_reader() -> None:
    message = rendered(
        Email(
            to=["Ann Lee <ann@example.com>", '"Lee, Bob" <bob@example.com>'],
            cc="Zoë <zoe@example.com>",
            reply_to="help@example.org",
            subject="Grüße aus Zürich",
            text="Schön.\n",
            headers={"List-Unsubscribe": "<https://example.org/u>"},
        )
    )
    assert message["From"] == "Club <club@example.org>"
    assert [(a.display_name, a.addr_spec) for a in message["To"].addresses] == [
        ("Ann Lee", "ann@example.com"),
        ("Lee, Bob", "bob@example.com"),
    ]
    assert [(a.display_name, a.addr_spec) for a in message["Cc"].addresses] == [("Zoë", "zoe@example.com")]
    assert message["Reply-To"] == "help@example.org"
    assert message["Subject"] == "Grüße aus Zürich"
    assert message["List-Unsubscribe"] == "<https://example.org/u>"
    assert message.get_content() == "Schön.\r\n"


def test_the_message_id_is_the_idempotency_key_and_the_same_at_every_attempt() -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi")
    key = outgoing().idempotency_key
    assert rendered(email)["Message-ID"] == f"<{key}@example.org>"
    assert rendered(email, attempt_count=5)["Message-ID"] == f"<{key}@example.org>"


def test_the_message_id_is_the_same_from_replicas_with_different_host_names() -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi")
    ids = {
        rendered(email, settings=settings_with(smtp_sender="club@example.org", smtp_ehlo_name=name))["Message-ID"]
        for name in ("replica1.example.net", "replica2.example.net")
    }
    assert len(ids) == 1


def test_there_is_exactly_one_valid_date() -> None:
    message = rendered(Email(to="ann@example.com", subject="Hello", text="Hi"))
    assert len(message.get_all("Date", [])) == 1
    assert parsedate_to_datetime(str(message["Date"])).utcoffset() is not None


def test_bcc_is_only_in_the_envelope() -> None:
    mail = render(
        Email(to="ann@example.com", cc="bob@example.com", bcc=["eve@example.com"], subject="Hello", text="Hi"),
        outgoing(),
        SETTINGS,
    )
    assert mail.recipients == ("ann@example.com", "bob@example.com", "eve@example.com")
    assert b"eve@" not in mail.content


def test_a_duplicate_recipient_is_in_the_envelope_once() -> None:
    mail = render(Email(to="ann@example.com", cc="ann@example.com", subject="Hello", text="Hi"), outgoing(), SETTINGS)
    assert mail.recipients == ("ann@example.com",)


@pytest.mark.parametrize(
    ("destination", "recipients"),
    [
        ("mailto:ann@example.com", ("ann@example.com",)),
        ("MAILTO:ann%2Bnews@example.com", ("ann+news@example.com",)),
    ],
)
def test_the_destination_is_the_recipient_if_to_is_empty(destination: str, recipients: tuple[str, ...]) -> None:
    mail = render(Email(subject="Hello", text="Hi"), outgoing(destination=destination), SETTINGS)
    assert mail.recipients == recipients


@pytest.mark.parametrize(
    ("destination", "problem"),
    [
        ("mailto:ann@example.com,bob@example.com", "must name one recipient, without a comma"),
        ("mailto:ann@example.com%2Cbob@example.com", "has more than one @"),
    ],
)
def test_a_destination_with_several_addresses_is_refused(destination: str, problem: str) -> None:
    with pytest.raises(Permanent, match=rf"^destination: {problem}"):
        render(Email(subject="Hello", text="Hi"), outgoing(destination=destination), SETTINGS)


def test_to_takes_precedence_over_the_destination() -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi")
    assert render(email, outgoing(destination="mailto:bob@example.com"), SETTINGS).recipients == ("ann@example.com",)


def test_a_missing_sender_costs_no_attempt() -> None:
    with pytest.raises(Unavailable, match="PGOUTBOX_SMTP_SENDER is not set"):
        render(Email(to="ann@example.com", subject="Hello", text="Hi"), outgoing(), load_settings())


def test_a_domain_beyond_ascii_is_written_in_its_ascii_form() -> None:
    mail = render(Email(to="ann@bücher.example", subject="Hello", text="Hi"), outgoing(), SETTINGS)
    assert mail.recipients == ("ann@xn--bcher-kva.example",)
    assert mail.smtputf8_problem is None
    assert mail.content.isascii()


def test_a_local_part_beyond_ascii_names_the_field_that_needs_smtputf8() -> None:
    email = Email(to="ann@example.com", cc=["bob@example.com", "zoë@example.com"], subject="Hello", text="Hi")
    mail = render(email, outgoing(), SETTINGS)
    assert mail.smtputf8_problem == "email.cc[1]: is not ASCII before @"
    assert "zoë@example.com" in mail.content.decode()


def test_text_and_html_become_alternatives_and_attachments_follow() -> None:
    message = rendered(
        Email(
            to="ann@example.com",
            subject="Hello",
            text="plain",
            html="<p>rich",
            attachments=[
                Attachment("Übersicht.pdf", b"%PDF", "application/pdf"),
                Attachment("invite.ics", b"BEGIN:VCALENDAR", "text/calendar; method=REQUEST"),
            ],
        )
    )
    assert message.get_content_type() == "multipart/mixed"
    plain, rich = message.get_body(("plain",)), message.get_body(("html",))
    assert plain is not None
    assert plain.get_content() == "plain\r\n"
    assert rich is not None
    assert rich.get_content() == "<p>rich\r\n"
    pdf, invitation = message.iter_attachments()
    assert (pdf.get_filename(), pdf.get_content_type(), pdf.get_content()) == (
        "Übersicht.pdf",
        "application/pdf",
        b"%PDF",
    )
    assert invitation["Content-Type"].params["method"] == "REQUEST"
    assert invitation.get_payload(decode=True) == b"BEGIN:VCALENDAR"


def standard_content(email: Email, boundaries: Iterable[bytes]) -> bytes:
    """Return the content of an e-mail with its headers, as the standard library writes it."""
    utf8 = not str(email.to).isascii()
    mime = EmailMessage(policy=policy.SMTP.clone(cte_type="7bit", utf8=utf8))
    texts = [(subtype, text) for subtype, text in (("plain", email.text), ("html", email.html)) if text is not None]
    for number, (subtype, text) in enumerate(texts):
        add = mime.add_alternative if number else mime.set_content
        add(text, subtype=subtype, cte="base64" if "\0" in text else None)
    for attachment in email.attachments:
        media_type = policy.SMTP.header_factory("Content-Type", attachment.media_type)
        main, _, subtype = media_type.content_type.partition("/")
        mime.add_attachment(
            attachment.content,
            maintype=main,
            subtype=subtype,
            filename=attachment.filename,
            params=dict(media_type.params),
        )
    for part, boundary in zip((part for part in mime.walk() if part.is_multipart()), boundaries, strict=True):
        part.set_boundary(boundary.decode())
    return mime.as_bytes()


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.sampled_from(["ann@example.com", "zoë@example.com"]),
    st.lists(st.text(), min_size=2, max_size=2),
    st.lists(
        st.builds(
            Attachment,
            SAFE_TEXT,
            st.binary(max_size=200),
            st.sampled_from(
                [
                    "Application/PDF",
                    "text/calendar; method=REQUEST",
                    'image/png; name="ü"',
                    "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
                ]
            ),
        ),
        max_size=2,
    ),
)
@example("ann@example.com", ["line\r\n.\nlast", "<p>" + "ü" * 100], [Attachment("invoice 7.pdf", b"x" * 58)])
@example("ann@example.com", ["", "\0"], [Attachment("x" * 80, b""), Attachment('a"b.pdf', b"")])
@example("ann@example.com", ["x" * 79, "é" * 39], [Attachment("a.ics", b"", "text/calendar; method=REQUEST")])
def test_a_content_is_written_as_by_the_standard_library(
    to: str, texts: list[str], attachments: list[Attachment]
) -> None:
    plain, rich = texts
    for text, html in ((plain, None), (None, rich), (plain, rich)):
        email = Email(to=to, subject="Hello", text=text, html=html, attachments=attachments)
        try:
            content = render(email, outgoing(), SETTINGS).content
        except Permanent:
            return
        written = standard_content(email, re.findall(rb'boundary="(.*?)"', content))
        assert content.endswith(written)
        assert b"\r\n\r\n" not in content.removesuffix(written)


def test_html_alone_is_a_single_part() -> None:
    message = rendered(Email(to="ann@example.com", subject="Hello", html="<p>rich"))
    assert message.get_content_type() == "text/html"
    assert message.get_content() == "<p>rich\r\n"


def test_a_long_word_in_a_header_is_not_broken() -> None:
    url = "<https://example.org/unsubscribe?token=" + "0123456789" * 12 + ">"
    content = render(
        Email(to="ann@example.com", subject="Hello", text="Hi", headers={"List-Unsubscribe": url}), outgoing(), SETTINGS
    ).content
    assert f"List-Unsubscribe: {url}".encode() in header_lines(content)


def test_a_word_too_long_for_a_line_is_encoded() -> None:
    content = render(Email(to="ann@example.com", subject="x" * 2_000, text="Hi"), outgoing(), SETTINGS).content
    assert max(map(len, content.split(b"\r\n"))) <= 78
    assert parsed(content)["Subject"] == "x" * 2_000


def test_an_encoded_display_name_is_decoded_and_encoded_again() -> None:
    sender = formataddr(("Jürgen, im Büro", "juergen@example.org"))
    address = rendered(Email(to="ann@example.com", subject="Hello", text="Hi", sender=sender))["From"].addresses[0]
    assert (address.display_name, address.addr_spec) == ("Jürgen, im Büro", "juergen@example.org")


def fields_with(value: str) -> list[tuple[str, Callable[[], Email]]]:
    """Return e-mails that have this value in one header or address each, with the name of the field."""
    plain = Email(to="ann@example.com", subject="Hello", text="Hi")
    return [
        ("email.subject", lambda: replace(plain, subject=value)),
        ("email.to", lambda: replace(plain, to=f"ann{value}@example.com")),
        ("email.to[0]", lambda: replace(plain, to=[f"{value} <ann@example.com>"])),
        ("email.cc[0]", lambda: replace(plain, cc=[f"ann@example.com{value}"])),
        ("email.bcc", lambda: replace(plain, bcc=f"{value}ann@example.com")),
        ("email.reply_to", lambda: replace(plain, reply_to=f"a{value}nn@example.com")),
        ("email.sender", lambda: replace(plain, sender=f"Ann{value} <ann@example.com>")),
        ("email.headers['X-Tag']", lambda: replace(plain, headers={"X-Tag": value})),
        ("email.attachments[0].filename", lambda: replace(plain, attachments=[Attachment(value, b"")])),
        (
            "email.attachments[0].media_type",
            lambda: replace(plain, attachments=[Attachment("a", b"", f"text/plain{value}")]),
        ),
    ]


@pytest.mark.parametrize("character", "\r\n\0")
def test_a_line_end_or_nul_is_refused_in_every_field_by_name(character: str) -> None:
    for name, email in fields_with(f"x{character}Bcc: eve@example.com"):
        assert refusal(email) == f"{name}: contains CR, LF or NUL"


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x7f", "\x85", "\u2028", "\u2029", "\ud800"])
def test_any_other_line_separator_is_refused_in_every_field_by_name(character: str) -> None:
    for name, email in fields_with(f"x{character}y"):
        assert refusal(email) == f"{name}: contains the character U+{ord(character):04X}"


@pytest.mark.parametrize(
    "word",
    [
        "=?utf-8?q?x=0D=0ABcc=3A_eve=40example=2Ecom?=",
        "=?UTF-8?B?eA0KQmNjOiBldmVAZXhhbXBsZS5jb20=?=",
        "=?utf-16be?b?AHgADQAKAEIAYwBj?=",
        "=?iso-8859-1?q?x=0Ay?=",
        "=?utf-8?q?x?=\r\nBcc: eve@example.com",
    ],
)
def test_an_encoded_word_with_a_line_end_is_refused_in_every_field_by_name(word: str) -> None:
    for name, email in fields_with(word):
        assert refusal(email) == f"{name}: contains CR, LF or NUL"


@pytest.mark.parametrize("word", ["=?utf-8?b?a?=", "=?no-such-charset?q?x?=", "=?utf-8?q?=FF?="])
def test_an_encoded_word_that_cannot_be_decoded_is_refused(word: str) -> None:
    email = Email(to="ann@example.com", subject=word, text="Hi")
    assert refusal(email) == "email.subject: contains an encoded word that cannot be decoded"


def test_a_nested_encoded_word_is_refused() -> None:
    email = Email(to="ann@example.com", subject="=?utf-8?q?=3D=3Futf-8=3Fq=3F=3D0D=3D0ABcc=3F=3D?=", text="Hi")
    assert refusal(email) == "email.subject: contains an encoded word within an encoded word"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "is empty"),
        ("ann", "has no @"),
        ("ann@example.com@evil.example", "has more than one @; give several addresses as a sequence"),
        ("ann@example.com, bob@example.com", "has more than one @; give several addresses as a sequence"),
        ("ann@example.com\n", "contains CR, LF or NUL"),
        ("@example.com", "the part before @ is not a plain mailbox name"),
        ("ann lee@example.com", "the part before @ is not a plain mailbox name"),
        ('"ann lee"@example.com', "the part before @ is not a plain mailbox name"),
        ("ann..lee@example.com", "the part before @ is not a plain mailbox name"),
        ("ann\u202e@example.com", "the part before @ is not a plain mailbox name"),
        ("=?x?q?=41=3e?=@example.com", "contains an encoded word that cannot be decoded"),
        ("=?utf-8?q?ann?=@example.com", "the part before @ is not a plain mailbox name"),
        ("ann@", "the part after @ is not a domain"),
        ("ann@-example.com", "the part after @ is not a domain"),
        ("ann@example.com>", "the part after @ is not a domain"),
        ("ann@example..com", "the part after @ is not a domain"),
        ("ann@ex ample.com", "the part after @ is not a domain"),
        ("ann@" + "ü" * 70 + ".example", "the part after @ is not a domain"),
        ("ann@straße.example", "give a domain with U+00DF in its xn-- form"),
        ("a" * 65 + "@example.com", "is too long for an address"),
        ("Lee, Ann <ann@example.com>", "a display name with , must be quoted"),
        ("bob@example.com, Ann <ann@example.com>", "a display name with @ must be quoted"),
        ("<bob@example.com> <ann@example.com>", "a display name with < must be quoted"),
        ('Ann "Lee" <ann@example.com>', 'a display name with " must be quoted'),
        ('"Ann" Lee" <ann@example.com>', "the quotes of the display name do not match"),
        ('"Ann\\" <ann@example.com>', "the quotes of the display name do not match"),
    ],
)
def test_an_invalid_address_is_refused_with_the_reason(address: str, reason: str) -> None:
    assert refusal(lambda: Email(to=address, subject="Hello", text="Hi")) == f"email.to: {reason}"


@pytest.mark.parametrize(
    ("destination", "error"),
    [
        (None, "email.to: no recipient, and the message has no destination with mailto"),
        ("https://example.com", "email.to: no recipient, and the message has no destination with mailto"),
        ("mailto:", "destination: is empty"),
        ("mailto:ann@example.com?bcc=eve@example.com", "destination: header fields after ? are not accepted"),
        ("mailto:ann%0D%0A@example.com", "destination: contains CR, LF or NUL"),
        ("mailto:ann%FF@example.com", "destination: contains the character U+DCFF"),
    ],
)
def test_a_destination_used_as_recipient_must_be_an_address(destination: str | None, error: str) -> None:
    assert refusal(Email(subject="Hello", text="Hi"), destination=destination) == error


def test_more_recipients_than_the_limit_are_refused() -> None:
    many = [f"user{number}@example.com" for number in range(MAX_RECIPIENT_COUNT)]
    email = Email(to=many, cc="one@example.com", subject="Hello", text="Hi")
    assert refusal(email) == "email.to, cc, bcc: 1001 recipients are more than 1000"
    assert (
        refusal(lambda: Email(to=many * 10, subject="Hello", text="Hi"))
        == "email.to: 10000 addresses are more than 1000"
    )


@pytest.mark.parametrize(
    "name", ["Message-ID", "date", "FROM", "To", "Bcc", "Subject", "Content-Type", "MIME-Version", "Resent-To"]
)
def test_a_header_that_pgoutbox_sets_is_refused(name: str) -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi", headers={name: "x"})
    assert refusal(email) == f"email.headers[{name!r}]: is set by pgoutbox, not by headers"


@pytest.mark.parametrize("name", ["", "X Tag", "X-Tag:", "X-Täg", "X-Tag\r\nBcc", "X" * 77])
def test_an_invalid_header_name_is_refused(name: str) -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi", headers={name: "x"})
    assert refusal(email) == f"email.headers[{name!r}]: is not the name of a header"


@pytest.mark.parametrize("media_type", ["", "text", "multipart/mixed", "message/rfc822", "text/plain; a=b; a=c"])
def test_an_invalid_content_type_is_refused(media_type: str) -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi", attachments=[Attachment("a", b"", media_type)])
    assert refusal(email).startswith("email.attachments[0].media_type: ")


def test_attachments_above_the_limit_are_refused() -> None:
    half = Attachment("half.bin", bytes(MAX_ATTACHMENT_BYTES // 2 + 1))
    email = Email(to="ann@example.com", subject="Hello", text="Hi", attachments=[half, half])
    assert refusal(email) == "email.attachments: 26214402 bytes together are more than 26214400"


def test_an_attachment_that_is_not_bytes_is_refused() -> None:
    text = Attachment("a.txt", "text")  # type: ignore[arg-type] # the mistake under test
    email = Email(to="ann@example.com", subject="Hello", text="Hi", attachments=[text])
    assert refusal(email) == "email.attachments[0].content: must be bytes, not str"


def test_an_email_without_a_body_is_refused() -> None:
    assert refusal(lambda: Email(to="ann@example.com", subject="Hello")) == "email.text: neither text nor html is given"


def test_a_value_of_the_wrong_type_is_refused_by_name() -> None:
    wrong = Email(to="ann@example.com", subject=None, text="Hi")  # type: ignore[arg-type] # the mistake under test
    assert refusal(wrong) == "email.subject: must be text, not NoneType"
    wrong_to: Any = b"ann@example.com"
    assert (
        refusal(lambda: Email(to=wrong_to, subject="Hello", text="Hi"))
        == "email.to: must be an address or a sequence of addresses, not bytes"
    )
    wrong = Email(to="ann@example.com", subject="Hello", html=b"<p>")  # type: ignore[arg-type] # the mistake under test
    assert refusal(wrong) == "email.html: must be text, not bytes"


def test_a_lone_surrogate_in_the_body_is_refused() -> None:
    assert refusal(lambda: Email(to="ann@example.com", subject="Hello", text="a\ud800")) == (
        "email.text: contains the character U+D800"
    )


@pytest.mark.slow
@settings(deadline=None)
@given(SAFE_TEXT)
@example(" " * 1_200 + "x" + " " * 1_200)
@example("word " * 20 + " " * 100)
def test_any_safe_text_is_preserved_as_subject_and_custom_header(text: str) -> None:
    email = Email(to="ann@example.com", subject=text, text="Hi", headers={"X-Tag": text})
    content = render(email, outgoing(), SETTINGS).content
    message = parsed(content)
    assert str(message["Subject"]).strip() == text.strip()
    assert str(message["X-Tag"]).strip() == text.strip()
    assert not re.search(rb"\r\n[ \t]+\r\n", content)
    assert max(map(len, content.split(b"\r\n"))) <= 998


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(SAFE_TEXT, min_size=1, max_size=5))
@example(['say "hi"', "back\\slash", "a, <b@example.com>", "Zoë, Ann", "x" * 300])
def test_any_display_name_is_preserved_and_adds_no_address(names: list[str]) -> None:
    recipients = ['"' + re.sub(r'(["\\])', r"\\\1", name) + '" <ann@example.com>' for name in names]
    content = render(Email(to=recipients, subject="Hello", text="Hi"), outgoing(), SETTINGS).content
    assert [address.addr_spec for address in parsed(content)["To"].addresses] == ["ann@example.com"] * len(names)
    # The older parser joins neighbouring encoded words, as RFC 2047 requires; the newer one does not do so at every
    # fold.
    header = next(line for line in header_lines(content) if line.startswith(b"To: "))
    addresses = getaddresses([header.decode("ascii").removeprefix("To: ")])
    assert [address for _, address in addresses] == ["ann@example.com"] * len(names)
    assert [str(make_header(decode_header(name))).split() for name, _ in addresses] == [name.split() for name in names]


@pytest.mark.slow
@settings(deadline=None)
@given(st.text(SPECIALS | st.sampled_from("\r\n\0") | st.characters(), max_size=300))
def test_no_text_can_add_a_header_or_end_the_headers(text: str) -> None:
    """For any accepted text, the headers are the intended ones."""
    expected = [b"From", b"To", b"Subject", b"Date", b"Message-ID", b"X-Tag"]
    try:
        email = Email(
            to=f"{text} <ann@example.com>",
            subject=text,
            text="Hi",
            headers={"X-Tag": text},
            attachments=[Attachment(text, b"")],
        )
        content = render(email, outgoing(), SETTINGS).content
    except Permanent:
        return
    names = [line.partition(b":")[0] for line in header_lines(content)]
    assert names == [*expected, b"MIME-Version", b"Content-Type"]
    assert [address.addr_spec for address in parsed(content)["To"].addresses] == ["ann@example.com"]


@pytest.mark.slow
@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=1_500))
@example("NUL \0, lone CR \r, .\n.\n")
@example("long " * 1_000 + "x" * 5_000)
def test_any_body_is_preserved_with_short_lines_and_crlf(text: str) -> None:
    content = render(Email(to="ann@example.com", subject="Hello", text=text), outgoing(), SETTINGS).content
    assert content.isascii()
    assert b"\0" not in content
    assert re.search(rb"(?<!\r)\n|\r(?!\n)", content) is None
    assert max(map(len, content.split(b"\r\n"))) <= 998
    body = parsed(content).get_payload(decode=True)
    assert isinstance(body, bytes)
    assert body.splitlines() == (text.encode().splitlines() or [b""])


@pytest.mark.slow
@settings(deadline=None)
@given(st.emails())
def test_an_accepted_address_is_sent_unchanged(address: str) -> None:
    try:
        mail = render(Email(to=address, subject="Hello", text="Hi"), outgoing(), SETTINGS)
    except Permanent:
        return
    assert mail.recipients == (address,)
    assert aiosmtplib.email.parse_address(address) == address
    assert policy.default.header_factory("To", address).addresses[0].addr_spec == address
