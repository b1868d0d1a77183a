"""Whose fault a refusal of a mail server is. Pure.

An answer is judged by its parts, not by one list of sentences: the step, the basic code (RFC 5321), the enhanced code
(RFC 3463), the addresses that it quotes, and words about the client, the sender, a limit or the recipient. A server may
delay every refusal to RCPT, as Postfix does by default, so the step alone says little.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Cause(enum.IntEnum):
    """What an answer is about. If the recipients of one e-mail get several answers, the greatest one counts."""

    RECIPIENT = 1
    """This recipient: no repetition helps."""
    EMAIL = 2
    """This e-mail, its size or its content: no repetition helps."""
    LATER = 3
    """This recipient or this e-mail, for a time: greylisting, a full mailbox."""
    UNCLEAR = 4
    """Anything: a refusal that names no reason, or a fault of the server."""
    CONNECTION = 5
    """The server or the way to it is down."""
    LIMIT = 6
    """A limit of the account or of the client address: every e-mail has to wait."""
    SENDER = 7
    """The sender: refused until a setting, an account or a DNS record is fixed."""
    SERVER = 8
    """The account, the client address, its name or the relaying: refused until a setting is fixed."""


class Refusal(NamedTuple):
    """An answer of the server. `text` begins with the enhanced code, if any."""

    step: str
    code: int
    text: str
    sender: str = ""
    recipient: str = ""
    has_accepted_others: bool = False
    """Whether the server has accepted another recipient of this e-mail."""


_MAIL_STEPS: Final = frozenset({"MAIL", "RCPT", "DATA"})
_ENHANCED_CODE: Final = re.compile(r"([245])\.(\d{1,3})\.(\d{1,3})\b")

_ADDRESS: Final = re.compile(r"[^\s<>()\[\],;:'\"]+@[^\s<>()\[\],;:'\"]+")

# By RFC 3463, RFC 7372 and Exchange Online: the cause of a final refusal, and that of a temporary one, if it names it.
_BY_STATUS: Final[tuple[tuple[str, Cause | None, Cause | None], ...]] = (
    (r"1\.[78]|2\.252|7\.(2[0-7]|60|509|515)", Cause.SENDER, Cause.SENDER),
    (r"1\.([1-6]|10)|2\.[14]|4\.[14]|7\.1(2[4-9]|3\d)", Cause.RECIPIENT, Cause.LATER),
    (r"2\.3|3\.4|6\.\d+", Cause.EMAIL, Cause.LATER),
    (r"2\.2|4\.3", Cause.LATER, Cause.LATER),
    (r"2\.0", None, Cause.LATER),
    (r"3\.[125]", Cause.UNCLEAR, Cause.UNCLEAR),
    (r"4\.5|7\.70[58]", Cause.LIMIT, None),
    (r"7\.(8|9|11|13|54|57|64|50[123]|511|6\d\d)", Cause.SERVER, None),
)
_BY_CODE: Final = {530: Cause.SERVER, 534: Cause.SERVER, 535: Cause.SERVER, 538: Cause.SERVER, 555: Cause.EMAIL}
# A refusal for one of these reasons names the sender or the client only as the one that is counted.
_REASONS: Final = (
    (r"gr[ae]y-?list", Cause.LATER),
    (r"\btoo (big|large)\b|\bmessage size\b|\bsize (exceeds|limit)", Cause.EMAIL),
    (r"\b(mailbox|recipient|user)\b.*\b(full|quota)\b|\bover ?quota\b|^\W*quota exceeded", Cause.LATER),
    (
        (
            r"\b(exceed(s|ed|ing)?|reached|over|above)\b.*\b(limit|rate|quota|max(imum)?|messages?|e-?mails?)\b"
            r"|\bmax(imum)?\b.*\bexceeded\b"
            r"|\btoo (many|much) (messages|e-?mails?|mails?|connections|recipients|requests)\b"
            r"|\b(rate|sending|daily|hourly|message) ?-?(limit|quota)|\blimit (exceeded|reached)\b"
            r"|\bquota\b|\bthrottl|\bper (minute|hour|day)\b"
        ),
        Cause.LIMIT,
    ),
)
_SUBJECTS: Final = (
    (
        (
            r"\brelay|\brcpthosts\b|\bauth(enticat|\b)|\bmust (first )?(log|sign) ?in\b"
            r"|\baccount\b.*\b(disabled|suspended)|\bstarttls\b|\bencryption\b"
            r"|\b(client|your) (host|ip|address)\b|\bhelo\b|\behlo\b|\bip address\b"
            r"|\bblock(ed)? ?(using|list)|\bblacklist|\b(dns|r)bl\b|\bspamhaus\b|\breputation\b|\breverse dns\b"
        ),
        Cause.SERVER,
    ),
    (
        (
            r"\bsender\b.*\b(address|domain|reject|denied|refused|verif|not|unknown|invalid)|\bnot owned by\b"
            r"|\bfrom (header|address|field)\b|\bheader from\b|\bsend ?as\b|\breturn.path\b|\b(spf|dkim|dmarc)\b"
        ),
        Cause.SENDER,
    ),
    (
        (
            r"\b(no|unknown|invalid|nonexistent) (such )?(user|mailbox|recipient|address|person|account)\b"
            r"|\b(user|mailbox|recipient|address|account)\b.*"
            r"\b(unknown|not found|unavailable|disabled|inactive|(does|do)( not|n.t) exist)|\bunroute?able\b"
        ),
        Cause.RECIPIENT,
    ),
)
_CONTENT: Final = ((r"\b(spam|virus|malware|attachment)\b(?!.*\b(source|sender|abuse)\b)|\bphish", Cause.EMAIL),)


def cause_of(refusal: Refusal) -> Cause:
    """Return whose fault a refusal is.

    The first row that fits decides. The class of the enhanced code counts more than the basic code: 5xx with 4.x.x is
    temporary.

    | step | answer | cause |
    |---|---|---|
    | any | 421 | limit if words say so; else connection |
    | greeting, EHLO, STARTTLS, AUTH | 5xx; else | server; connection |
    | MAIL, RCPT, DATA | too many recipients, x.5.3 | e-mail, if others were accepted; else a limit |
    | | an enhanced code that names its subject | see `_BY_STATUS` |
    | | words about greylisting, size, a full mailbox, a limit | see `_REASONS` |
    | | the sender's own address is quoted, and no other | sender |
    | | 530, 534, 535, 538; 503 to MAIL | server |
    | | words about relaying, the client, the sender, the recipient | see `_SUBJECTS` |
    | DATA | words about the content, which no server knows earlier | e-mail |
    | RCPT | 552 | later |
    | MAIL | 552; another final refusal | e-mail: its size; sender |
    | MAIL, RCPT, DATA | another refusal | unclear |

    A refused recipient is the sender instead, if the server knows no other address, or quotes no other.
    """
    step, code, text = refusal.step, refusal.code, refusal.text
    is_final = 500 <= code <= 599
    if step not in _MAIL_STEPS and code != 421:
        return Cause.SERVER if is_final else Cause.CONNECTION
    enhanced = _ENHANCED_CODE.match(text)
    status = "" if enhanced is None else f"{enhanced[2]}.{enhanced[3]}"
    is_final = is_final and (enhanced is None or enhanced[1] != "4")
    words = _ADDRESS.sub("", text).lower()
    if status == "5.3" or (not status.startswith("7.") and re.search(r"\b(too many|number of) recipients", words)):
        return Cause.EMAIL if refusal.has_accepted_others else Cause.LIMIT
    reason = _by_words(_REASONS, words, is_final=is_final)
    if code == 421:
        return Cause.LIMIT if reason is Cause.LIMIT else Cause.CONNECTION
    quoted = {address.rstrip(".").lower() for address in _ADDRESS.findall(text)}
    is_senders = quoted == {refusal.sender.lower()} != {refusal.recipient.lower()}
    cause = (
        _by_status(status, is_final=is_final)
        or reason
        or (Cause.SENDER if is_senders else None)
        or _by_code(step, code, is_final=is_final)
        or _by_words(_SUBJECTS + (_CONTENT if step == "DATA" else ()), words, is_final=is_final)
        or _by_step(step, code, is_final=is_final)
    )
    return Cause.SENDER if cause is Cause.RECIPIENT and (is_senders or step == "MAIL") else cause


def _by_status(status: str, *, is_final: bool) -> Cause | None:
    causes = ((final, temporary) for pattern, final, temporary in _BY_STATUS if re.fullmatch(pattern, status))
    final, temporary = next(causes, (None, None))
    return final if is_final else temporary


def _by_words(table: Sequence[tuple[str, Cause]], words: str, *, is_final: bool) -> Cause | None:
    cause = next((cause for pattern, cause in table if re.search(pattern, words)), None)
    return Cause.LATER if cause in {Cause.RECIPIENT, Cause.EMAIL} and not is_final else cause


def _by_code(step: str, code: int, *, is_final: bool) -> Cause | None:
    """Return the cause if the code says that the server wants a sign-in or other options."""
    if not is_final:
        return None
    return Cause.SERVER if step == "MAIL" and code == 503 else _BY_CODE.get(code)


def _by_step(step: str, code: int, *, is_final: bool) -> Cause:
    if is_final and step == "MAIL":
        return Cause.EMAIL if code == 552 else Cause.SENDER
    return Cause.LATER if is_final and step == "RCPT" and code == 552 else Cause.UNCLEAR
