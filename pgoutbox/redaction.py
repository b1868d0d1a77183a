"""Redaction: hide values with names such as `password`, and secrets of known forms, in views, output and logs. Pure.

A name matches a member whose own name contains it, ignoring case, blanks, hyphens and underscores: `token` matches
`Access-Token`. Short words such as `pass` match only a whole word of a name: in `smtp_pass`, not in `passenger`. A
name with dots is a path that matches the end of a member's path, without lists: `user.email` matches the `email` of
each of `users`. When in doubt, a value is hidden.

`text_forms` is the one definition of the secrets in texts: `tools.reference` writes the SQL function of the views from
it. So each form means the same to Python and to PostgreSQL. A form uses ASCII classes, no lazy or possessive repetition
and no back reference, and its alternatives exclude each other: Python takes the first one, PostgreSQL the longest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from pydantic import JsonValue

REDACTED: Final = "(redacted)"
REDACTED_NAMES: Final = (
    "password",
    "passwd",
    "passphrase",
    "passcode",
    "secret",
    "token",
    "authorization",
    "cookie",
    "credential",
    "api_key",
    "access_key",
    "account_key",
    "auth_key",
    "encryption_key",
    "private_key",
    "signing_key",
    "session_id",
    "sessid",
    "csrf",
    "xsrf",
)

REDACTED_WORDS: Final = frozenset(
    {"pass", "pwd", "jwt", "sig", "signature", "otp", "totp", "pin", "cvv", "cvc", "session"}
)

# The fields that a reason of pgoutbox names at its beginning: `raw_email.data: line 3 has a bare LF`. Whatever an
# application hides, they are not names of secrets.
OWN_FIELDS: Final = {
    "email": (
        "subject", "to", "text", "html", "sender", "cc", "bcc", "reply_to", "headers", "attachments", "envelope_sender",
        "kind",
    ),
    "raw_email": ("data", "to", "envelope_sender"),
    "webhook": ("url", "body", "headers", "media_type", "method", "request", "secret_name", "secrets", "signed"),
    "event": ("type", "source", "subject", "data", "content_type", "extensions", "headers", "key", "mode"),
    "notification": ("title", "body", "kind", "format"),
}  # fmt: skip
OWN_FIELD: Final = (
    r"\A(?:destination|"
    + "|".join(rf"{kind}\.(?:{'|'.join(names)})" for kind, names in OWN_FIELDS.items())
    + r")(?:\[[^\[\]\r\n]{0,100}\](?:\.[a-z_]{1,20})?)?: "
)
_OWN_FIELD: Final = re.compile(OWN_FIELD)

_NOT_IN_NAMES = str.maketrans("", "", "-_ ")
_WORD = re.compile(r"[A-Z]++(?![a-z])|[A-Z]?[a-z]++|[A-Z]")
# Longer texts are cut off, because the forms pass over the whole text a dozen times.
MAX_TEXT_CHARS: Final = 1_000_000

# --- the parts of the forms -------------------------------------------------------------------------------------------

_SPACE: Final = r" \t\r\n\f\v"
_NAME_CHAR: Final = "[A-Za-z0-9_.%-]"
_NOT_YET: Final = r"(?!\(redacted\))"
# A sentence about a field, as validators write it: `token: Field required`, `password: must be longer`.
_SENTENCE: Final = (
    r"(?:(?:[Mm]ust|[Ss]hould|[Mm]ay|[Cc]annot|[Cc]ould|[Ii]s|[Aa]re|[Ww]as|[Hh]as|[Dd]oes|[Dd]id|[Nn]o|[Nn]ot|[Tt]oo"
    r"|[Rr]equired|[Mm]issing|[Ii]nvalid|[Ee]xpired|[Dd]enied|[Uu]nknown|[Uu]nexpected|[Ff]ailed|[Ww]rong|[Ee]mpty"
    r"|[Uu]nable|[Uu]nsupported|[Cc]losed)(?![A-Za-z0-9_@#$%^&*=+/-])"
    r"|[Tt]oken (?:is|has|was|must|expired|missing|invalid|required|not)(?![A-Za-z0-9])"
    r"|(?:[Ff]ield|[Ii]nput|[Vv]alue|[Ss]tring|[Dd]ata|[Ll]ist|[Ee]xtra|[Ss]ignature|[Aa]ccess|[Pp]ermission"
    r"|[Cc]onnection|[Tt]he|[Aa]|[Aa]n|[Tt]his|[Aa]uthentication) [a-z]{2,15}(?![A-Za-z0-9_@#$%^&*=+/~-]))"
)
_STRING: Final = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_BRACKETS_BEGIN, _BRACKETS_END = rf"""[(\[{{](?:[^\[\](){{}}"'\\]|\\.|{_STRING}""", r")*[)\]}]"
_NESTED: Final = 4
_GROUP: Final = f"{_BRACKETS_BEGIN}|" * (_NESTED - 1) + _BRACKETS_BEGIN + _BRACKETS_END * _NESTED
# A value that ends by itself. Deeper brackets and unclosed quotes hide the rest of the text.
_NOTHING_FOLLOWS: Final = rf"(?![^{_SPACE},;:.&)\]}}])"
_CLOSED: Final = rf"""(?:[bBrRuUfF]{{0,2}}{_STRING}+{_NOTHING_FOLLOWS}|{_GROUP}(?:(?=["'])|{_NOTHING_FOLLOWS}))"""
# The next name ends a value: `password=x y port=5432`, `password: x, to: ann`.
_NEXT: Final = r"""[ \t,;&]{0,2}["']?[A-Za-z_][A-Za-z0-9_.-]*(?:=[^=\r\n \t]|["']?:(?=[ \t]))"""
_AT_END: Final = rf"(?![{_SPACE},;:&)\]}}]|\Z)"
_UNQUOTED: Final = (
    rf"""[^{_SPACE}"'(\[{{)\]}}\\,;&](?:[^{_SPACE},;&"'()\[\]{{}}]|[ \t,;&](?!{_NEXT})|["')\]}}]{_AT_END}|{_GROUP})*"""
    rf"""(?:(?!{_GROUP})[(\[{{].*)?"""
)
_BLOCK: Final = r"[|>][-+0-9]{0,2}[ \t]*(?:\r?\n[ \t]+[^\r\n]*)+"  # Of YAML.
_VALUE: Final = (
    rf"""(?:{_CLOSED}|(?!{_CLOSED})(?:{_BLOCK}|[bBrRuUfF]{{0,2}}["'(\[{{].*|\\[^\r\n]*"""
    rf"""|[,;&)\]}}](?![{_SPACE},;:)\]}}]|\Z|{_NEXT})[^\r\n]*|(?!{_BLOCK})(?![bBrRuUfF]{{0,2}}["'(\[{{]){_UNQUOTED}))"""
)

# --- the forms --------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """A form of secrets in a text: of each match, the first group stays and the rest is replaced.

    `pattern` is for Python's `re` with ASCII and DOTALL, and for PostgreSQL. It is only tried if the text, squeezed,
    contains one of `hints`; without hints always.
    """

    pattern: str
    hints: tuple[str, ...] = ()


_SEPARATOR: Final = r"""(?:\\{0,8}["'])?[)\]]{0,2}[ \t]{0,8}"""
_INDENT: Final = r"[ \t]*(?:\r?\n[ \t]+(?:- |(?!- )))?"
# Between name and value: `=`, `:` and `->`, also percent-encoded; a tag of XML; the comma of ('name', 'value').
_SIGN: Final = (
    rf"(?:=[=>]*(?![=>])[ \t]*|%3[ADad]|:(?![:/]){_INDENT}(?!{_SENTENCE})|->[ \t]*"
    rf"""|>(?=[^{_SPACE}<>"':;,.)\]}}])|(?<=["']),[ \t]{{0,2}}(?=[bB]?["']))"""
)
_HOST_PORT: Final = rf"[0-9]{{1,5}}(?:[{_SPACE},;.)\]}}/?#]|\Z)"
# A password that is not percent-encoded may contain `/`, `?`, `#`, `@` or a blank: then it ends at the last `@`.
_USER: Final = rf"""[^{_SPACE}/?#"'<>:@]*:(?!{_HOST_PORT})"""
_ENCODED: Final = rf"""[^{_SPACE}/?#"'<>]*(?=@)"""
_UNENCODED: Final = rf"""{_USER}(?:[^{_SPACE}"'<>:]|:(?!//))*(?=@)"""
_NO_BLANKS: Final = rf"(?!{_ENCODED})(?!{_UNENCODED})"
_WITH_BLANKS: Final = rf"""{_NO_BLANKS}{_USER}(?![{_SPACE}])(?:[^\r\n"'<>@:]|:(?!//))*(?=@)"""
_PATH_CHAR: Final = r"[A-Za-z0-9_~=%.:-]"
_WORD_START: Final = r"(?:\A|[^A-Za-z0-9])"
_FORMS: Final = (
    Form(rf"(?i)(https?://)(?:{_ENCODED}|(?!{_ENCODED}){_UNENCODED}|{_WITH_BLANKS})", ("://",)),
    Form(rf"(?i)((?<!http)(?<!https)://)(?:{_UNENCODED}|(?!{_UNENCODED}){_ENCODED}|{_WITH_BLANKS})", ("://",)),
    # A link that lets its holder in: /reset/TOKEN, /reset/UID/TOKEN. Not the path of a file.
    Form(
        r"(?i)(/[a-z_-]{0,20}(?:reset|verif|activat|confirm|invit|magic|unsubscri|token|login|signin|signup|passw|session)[a-z_-]{0,20}/)"
        rf"{_NOT_YET}(?![A-Za-z0-9_~=%.:/-]{{0,100}}\.(?:[a-z]{{1,2}}|html?|json|java|php|txt|tsx)(?!{_PATH_CHAR}))"
        rf"(?:[a-z0-9_=-]{{1,20}}/)?(?:(?={_PATH_CHAR}{{0,40}}[0-9])(?={_PATH_CHAR}{{0,40}}[a-z]){_PATH_CHAR}{{6,}}"
        rf"|(?!{_PATH_CHAR}{{0,40}}[0-9]){_PATH_CHAR}{{20,}})",
        (
            *("reset", "verif", "activat", "confirm", "invit", "magic", "unsubscri", "token", "login", "signin"),
            *("signup", "passw", "session"),
        ),
    ),
    Form(
        r"(?i)(hooks\.slack\.com/(?:services|workflows|triggers)/|/api/webhooks/[0-9]+/|api\.telegram\.org/bot"
        r"|\.office\.com/webhook(?:b2)?/|hooks\.zapier\.com/hooks/catch/|events\.pagerduty\.com/integration/)"
        rf"{_NOT_YET}[^{_SPACE}?#\"'<>]+",
        (
            "hooks.slack.com",
            "/api/webhooks/",
            "api.telegram.org",
            "office.com",
            "hooks.zapier.com",
            "events.pagerduty.com",
        ),
    ),
    Form(
        rf"(?i)((?:authorization|cookie)[ \t]*:[ \t]*)(?![{_SPACE}\"']){_NOT_YET}(?!{_SENTENCE})"
        rf"""(?:[^\r\n"']|["'](?![{_SPACE})\]}}]|\Z))+""",
        ("authorization", "cookie"),
    ),
    Form(
        rf"({_WORD_START}(?:[Bb]earer|BEARER)(?:[ \t]+|%20|[:=][ \t]*)[\"']?)"
        r"(?!(?:auth[a-z]*|realm|scheme|error|scope|is|of|has|was|and|or|not"
        r"|for|in|with|must|format|type|header|(?:token|credential)s?|required|expected|missing|invalid)"
        r"(?![A-Za-z0-9._~+/-]))[A-Za-z0-9._~+/=-]+",
        ("bearer",),
    ),
    Form(
        rf"(?i)({_WORD_START}(?:basic|digest|negotiate)[ \t]+)"
        r"(?:(?=[a-z0-9_.~+/-]{0,200}[0-9])[a-z0-9_.~+/-]{6,}|(?![a-z0-9_.~+/-]{0,200}[0-9])[a-z0-9_.~+/-]{20,})=*",
        ("basic", "digest", "negotiate"),
    ),
    Form(
        rf"({_WORD_START}(?:AUTH|auth)(?:ENTICATE|enticate)?[ \t]+"
        r"(?:PLAIN|LOGIN|XOAUTH2|OAUTHBEARER|plain|login)[ \t]+)"
        r"(?=[A-Z0-9+/=]*[a-z])(?![A-Z]?[a-z]+(?![A-Za-z0-9+/=]))[A-Za-z0-9+/]{4,}=*",
        ("authplain", "authlogin", "authxoauth2", "authoauthbearer", "authenticate"),
    ),
    Form(  # Of curl.
        rf"((?:\A|[^A-Za-z0-9-])(?:-u|--(?:proxy-)?user)[ \t=]+[\"']?[A-Za-z][^{_SPACE}:\"'=]{{0,100}}:)"
        rf"[^{_SPACE}\"']+",
        ("curl",),
    ),
    Form(
        rf"(?i)({_WORD_START}(?:(?:passw(?:or)?d|pass(?:phrase|code)|pwd|otp|(?:verification|security|login)[ -]code)"
        rf"(?:[ \t]*:[ \t]*|[ \t]+(?:(?:is|was)[ \t]+)?)|(?:token|secret|api[ _-]?key)[ \t]+(?=[^{_SPACE}]{{8}})))"
        rf"(?=[^{_SPACE}0-9]{{0,100}}[0-9])[^{_SPACE}]+",
        ("pass", "pwd", "otp", "code", "token", "secret", "apikey"),
    ),
    # Secrets that are recognised by themselves: private keys, tokens of known issuers; seeds of NATS, payment cards.
    Form(
        r"()-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:[^-]|-(?!----END ))*(?:-----END [A-Z ]{0,40}-----)?",
        ("privatekey",),
    ),
    Form(
        r"((?:\A|[^A-Za-z0-9_-]))(?:eyJ[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*){2,4}|gAAAA[A-Za-z0-9_-]{40,}=*"
        r"|A[KS]IA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{10,}|gh[opsur]_[A-Za-z0-9]{6,}"
        r"|github_pat_[A-Za-z0-9_]{6,}|gl[a-z]{2,5}-[A-Za-z0-9_.-]{10,}|x(?:ox[a-z]|app)-[A-Za-z0-9-]{6,}"
        r"|[sr]k_(?:live|test)_[A-Za-z0-9]{6,}|whsec_[A-Za-z0-9+/=_-]{6,}|sk-[A-Za-z0-9_-]{20,}"
        r"|SG\.[A-Za-z0-9_-]{6,}(?:\.[A-Za-z0-9_-]+)?|(?:npm|hf|shp(?:at|ss|ca)|dop_v1)_[A-Za-z0-9]{16,}"
        r"|pypi-[A-Za-z0-9_-]{16,}|key-[0-9a-f]{32}|AGE-SECRET-KEY-[A-Z0-9]+"
        r"|x(?:key|smtp)sib-[a-z0-9]{16,}(?:-[A-Za-z0-9]+)?|re_[A-Za-z0-9]{6,}_[A-Za-z0-9]{10,}|mlsn\.[a-z0-9]{16,}"
        r"|hvs\.[A-Za-z0-9_-]{16,}|dapi[0-9a-f]{32}|SK[0-9a-f]{32}|(?:glsa|dckr_pat|lin_api)_[A-Za-z0-9_-]{16,}"
        r"|(?:bot)?[0-9]{8,10}:AA[A-Za-z0-9_-]{30,})",
        (
            *("eyj", "gaaaa", "akia", "asia", "aiza", "ya29.", "ghp", "gho", "ghs", "ghu", "ghr", "githubpat", "gl"),
            *("xox", "xapp", "sklive", "rklive", "sktest", "rktest", "whsec", "sk", "sg.", "npm", "hf", "shpat"),
            *("shpss", "shpca", "dopv1", "pypi", "key", "agesecretkey", ":aa", "sib", "re", "mlsn.", "hvs.", "dapi"),
            *("dckrpat", "linapi"),
        ),
    ),
    Form(
        r"((?:\A|[^A-Za-z0-9.-]))(?:S[ACNOUX][A-Z2-7]{56}"
        r"|(?:4[0-9]{3}|5[1-5][0-9]{2}|2[2-7][0-9]{2}|6(?:011|5[0-9]{2}))(?:[ -]?[0-9]{4}){3}"
        r"|3[47][0-9]{2}[ -]?[0-9]{6}[ -]?[0-9]{5})(?![A-Za-z0-9-]|\.[0-9])"
    ),
)


@lru_cache
def text_forms(names: tuple[str, ...] = REDACTED_NAMES) -> tuple[Form, ...]:
    """Return the forms of the secrets in a text, in the order in which they are replaced."""
    # pydantic quotes an `input_value`, on a line that does not name the field.
    parts = tuple(dict.fromkeys(["inputvalue", *(_parts(name)[-1] for name in names)]))
    name = "(?:" + "|".join("[-_ ]?".join(map(re.escape, part)) for part in parts) + ")"
    words = tuple(sorted(REDACTED_WORDS))
    any_word = "|".join(words)
    capitals = "|".join(word.capitalize() for word in words)
    word = rf"(?:(?:\A|[^A-Za-z])(?:{any_word}|{capitals}|{any_word.upper()})|[a-z](?:{capitals}))(?![a-z])"
    suffix = rf"{_NAME_CHAR}{{0,64}}"  # Bounded: Python tries it again for each name in it.
    start = f"{_NAME_CHAR}*"
    query = rf"{start}{name}{suffix}|(?:{start}[-_.])?(?:{any_word}|key|code)(?:[-_.]{suffix})?"
    option = rf"(?:\A|[^A-Za-z0-9-])--[a-z0-9_-]*(?:{name}|(?:{any_word})(?![a-z])){suffix}"
    option_value = rf"(?:{_STRING}|[^{_SPACE}\"'-][^{_SPACE}\"']*)"
    value = (
        rf"(?:[A-Za-z0-9_.-]|%(?!3[ADad])){{0,64}}{_SEPARATOR}{_SIGN})"
        rf"(?![{_SPACE}]){_NOT_YET}{_VALUE}"
    )
    return (
        Form(rf"(?i)([?&](?:{query})=){_NOT_YET}[^{_SPACE}&#\"'<>]+", ("?", "&")),
        *_FORMS[:5],
        Form(f"(?i)({name}{value}", parts),
        Form(f"({word}{value}", words),
        Form(
            rf"(?i)({option}[ \t]+)(?!{_SENTENCE}){_NOT_YET}{option_value}",
            (*parts, *words),
        ),
        *_FORMS[5:],
    )


def squeezed(text: str) -> str:
    """Return the text in the spelling of names and hints: lower case, without blanks, hyphens and underscores."""
    return text.lower().translate(_NOT_IN_NAMES)


@lru_cache
def _compiled(names: tuple[str, ...]) -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    return tuple((re.compile(form.pattern, re.ASCII | re.DOTALL), form.hints) for form in text_forms(names))


def redact(value: JsonValue, names: Collection[str] = REDACTED_NAMES) -> JsonValue:
    """Return `value` with the values of all members that match one of `names` replaced, at any depth.

    In the other texts it hides the same as `redact_text`: a payload often contains a link with a token.

    >>> redact({"to": "ann", "reset_token": "x", "user": {"email": "a@b.example"}}, ("token", "user.email"))
    {'to': 'ann', 'reset_token': '(redacted)', 'user': {'email': '(redacted)'}}
    """
    return _redact(value, tuple(names), ())


def _redact(value: JsonValue, names: tuple[str, ...], path: tuple[str, ...]) -> JsonValue:
    match value:
        case dict():
            members: dict[str, JsonValue] = {}
            for key, item in value.items():
                here = (*path, squeezed(key))
                has_telling_word = any(word.lower() in REDACTED_WORDS for word in _WORD.findall(key))
                is_hidden = has_telling_word or any(_matches(here, _parts(name)) for name in names)
                members[key] = REDACTED if is_hidden else _redact(item, names, here)
            return members
        case list():
            return [_redact(item, names, path) for item in value]
        case str():
            return redact_text(value, names)
        case _:
            return value


def redact_text(text: str, names: Iterable[str] = REDACTED_NAMES) -> str:
    """Return `text`, such as an error, without the values next to one of `names`, and without secrets of known forms.

    It finds `key=value`, `key: value`, `"key": "value"` and similar forms, authorization headers, the user and password
    of a URL, and the tokens of known issuers. A text has no paths, so of a name with dots only the last part is used.
    The field at the beginning of pgoutbox's own reasons stays, with the reason.

    >>> redact_text("login(user='ann', password='x y') at https://ann:pw@example.org/?token=abc&page=2")
    "login(user='ann', password=(redacted)) at https://(redacted)@example.org/?token=(redacted)&page=2"
    """
    text = text[:MAX_TEXT_CHARS]
    field = own[0] if (own := _OWN_FIELD.match(text)) else ""
    text = text[len(field) :]
    hint = squeezed(text)
    for pattern, hints in _compiled(tuple(names)):
        if not hints or any(part in hint for part in hints):
            text = pattern.sub(rf"\1{REDACTED}", text)
    return field + text


def check_redacted_name(name: object) -> None:
    """Raise `ValueError` for an invalid name."""
    if not isinstance(name, str) or not all(squeezed(part.strip()) for part in name.split(".")):
        raise ValueError(
            f"{name!r} is not a valid name of values to hide; give a name such as email, or a path such as user.email"
        )


def _parts(name: str) -> list[str]:
    return [squeezed(part) for part in name.split(".") if part]


def _matches(path: Sequence[str], name: Sequence[str]) -> bool:
    if len(name) == 1:
        return name[0] in path[-1]
    end = [part for key in path for part in key.split(".")][-len(name) :]
    return len(end) == len(name) and all(part in key for part, key in zip(name, end, strict=True))
