"""Tests the redirect of e-mail for test systems: redirected, exempt, and forbidden recipients."""

from __future__ import annotations

import pytest

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, Postponed, ReasonCode
from pgoutbox.settings import Settings
from pgoutbox.transports.redirect import RedirectRules, check_topics, covering, held_back
from pgoutbox.transports.smtp.mail import Email, RenderedEmail, render
from tests.support.sends import outgoing
from tests.support.settings import settings_with
from tests.support.smtp_server import parsed

BLACKOUT = "2026-04-01/2026-09-30"
EMAIL = Email(to="Ann Lee <ann@example.com>", cc="bob@example.com", bcc="eve@example.net", subject="Hello", text="Hi")


def settings_for(to: str | None, **overrides: object) -> Settings:
    return settings_with(smtp_sender="club@example.org", redirect_to=to, **overrides)


def redirected(email: Email, to: str | None, **overrides: object) -> RenderedEmail:
    blackout = overrides.pop("blackout", None)
    settings = settings_for(to, **overrides)
    rules = RedirectRules.of(settings.redirect)
    redirect = covering(rules.redirects(blackout=None if blackout is None else str(blackout)), "greet")
    return render(email, outgoing(destination="mailto:dan@example.com"), settings, redirect)


def shown(mail: RenderedEmail, header: str) -> list[tuple[str, str]]:
    return [(address.display_name, address.addr_spec) for address in parsed(mail.content)[header].addresses]


def test_one_address_gets_all_email_with_the_original_names() -> None:
    mail = redirected(EMAIL, "tester@example.org")
    assert mail.recipients == ("tester@example.org",)
    assert shown(mail, "To") == [("Ann Lee", "tester@example.org")]
    assert shown(mail, "Cc") == [("", "tester@example.org")]
    assert parsed(mail.content)["X-Pgoutbox-Original-To"] == "ann@example.com, bob@example.com, eve@example.net"


def test_a_domain_gets_all_email_at_addresses_that_contain_the_original() -> None:
    mail = redirected(EMAIL, "@test.example.org")
    assert mail.recipients == (
        "ann=example.com@test.example.org",
        "bob=example.com@test.example.org",
        "eve=example.net@test.example.org",
    )
    assert shown(mail, "To") == [("Ann Lee", "ann=example.com@test.example.org")]
    assert shown(mail, "Cc") == [("", "bob=example.com@test.example.org")]


def test_the_destination_is_redirected_like_a_recipient() -> None:
    assert redirected(Email(subject="Hello", text="Hi"), "@test.example.org").recipients == (
        "dan=example.com@test.example.org",
    )


def test_long_names_are_truncated_and_stay_distinct() -> None:
    long = [f"{'a' * 60}{number}@{'b' * 40}.example.com" for number in range(20)]
    recipients = redirected(Email(to=long, subject="Hello", text="Hi"), "@test.example.org").recipients
    assert len(set(recipients)) == 20
    assert {len(recipient.partition("@")[0]) for recipient in recipients} == {64}


def test_a_name_beyond_ascii_needs_no_smtputf8_at_one_address() -> None:
    mail = redirected(Email(to="zoë@example.com", subject="Hello", text="Hi"), "tester@example.org")
    assert mail.smtputf8_problem is None
    assert parsed(mail.content)["X-Pgoutbox-Original-To"] == "zoë@example.com"


def test_many_original_recipients_create_no_long_line() -> None:
    many = Email(to=[f"user{number}@example.com" for number in range(1_000)], subject="Hello", text="Hi")
    mail = redirected(many, "tester@example.org")
    assert max(map(len, mail.content.split(b"\r\n"))) <= 998
    assert len(parsed(mail.content)["X-Pgoutbox-Original-To"].split(", ")) == 1_000


@pytest.mark.parametrize("exempt", ["ann@example.com, x@y.test", "Ann@Example.com", "@example.com"])
def test_recipients_on_the_allowlist_get_their_email(exempt: str) -> None:
    email = Email(to=["Ann Lee <ann@example.com>", "eve@example.net"], subject="Hello", text="Hi")
    mail = redirected(email, "tester@example.org", redirect_exempt=exempt)
    assert mail.recipients == ("ann@example.com", "tester@example.org")
    assert shown(mail, "To") == [("Ann Lee", "ann@example.com"), ("", "tester@example.org")]
    assert parsed(mail.content)["X-Pgoutbox-Original-To"] == "eve@example.net"


@pytest.mark.parametrize("exempt", ["@ample.com", "@sub.example.com", "lee@example.com", "ann@example.com.test"])
def test_no_other_recipient_gets_email(exempt: str) -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi")
    assert redirected(email, "tester@example.org", redirect_exempt=exempt).recipients == ("tester@example.org",)


def test_a_bcc_recipient_is_not_revealed_to_the_allowlist() -> None:
    mail = redirected(EMAIL, "tester@example.org", redirect_exempt="ann@example.com")
    assert parsed(mail.content)["X-Pgoutbox-Original-To"] == "bob@example.com"
    assert b"eve@" not in mail.content


def test_an_email_only_to_the_allowlist_is_unchanged() -> None:
    mail = redirected(EMAIL, "tester@example.org", redirect_exempt="@example.com,@example.net")
    assert mail.recipients == ("ann@example.com", "bob@example.com", "eve@example.net")
    assert "X-Pgoutbox-Original-To" not in parsed(mail.content)


def test_the_message_id_and_the_sender_are_unchanged() -> None:
    mail, usual = redirected(EMAIL, "tester@example.org"), redirected(EMAIL, None)
    assert mail.sender == usual.sender
    assert parsed(mail.content)["Message-ID"] == parsed(usual.content)["Message-ID"]


def test_a_handler_cannot_set_the_redirect_header() -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi", headers={"X-pgoutbox-Original-To": "x"})
    with pytest.raises(Permanent, match="is set by pgoutbox, not by headers"):
        redirected(email, None)


def test_without_a_redirect_the_allowlist_and_the_days_have_no_effect() -> None:
    mail = redirected(EMAIL, None, redirect_exempt="ann@example.com", blackout=BLACKOUT)
    assert mail.recipients == ("ann@example.com", "bob@example.com", "eve@example.net")


def test_on_forbidden_days_an_email_waits_unless_all_its_recipients_are_exempt() -> None:
    overrides = {"redirect_exempt": "@example.com", "blackout": BLACKOUT}
    with pytest.raises(Postponed) as caught:
        redirected(EMAIL, "tester@example.org", **overrides)
    assert (caught.value.code, caught.value.reason) == (
        ReasonCode.REDIRECT,
        f"refuses to redirect to tester@example.org within the blackout {BLACKOUT}",
    )
    mail = redirected(Email(to="ann@example.com", subject="Hello", text="Hi"), "tester@example.org", **overrides)
    assert mail.recipients == ("ann@example.com",)


def test_the_pauses_of_held_back_messages_grow_to_five_minutes() -> None:
    pauses = [held_back(outgoing(attempt_count=count), "x").delay_seconds for count in (1, 5, 9, 2_000_000)]
    assert 1 <= pauses[0] <= 2
    assert 16 <= pauses[1] <= 32
    assert all(150 <= pause <= 300 for pause in pauses[2:])


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ({"redirect_to": "tester"}, "PGOUTBOX_REDIRECT_TO: has no @; give an address, or @ and a domain"),
        ({"redirect_to": "@"}, "PGOUTBOX_REDIRECT_TO: the part after @ is not a domain"),
        ({"redirect_to": "@example.org,x@example.org"}, "PGOUTBOX_REDIRECT_TO: has more than one @"),
        ({"redirect_to": "@" + "a." * 95 + "org"}, "PGOUTBOX_REDIRECT_TO: is too long for an address"),
        ({"redirect_exempt": "example.org"}, "PGOUTBOX_REDIRECT_EXEMPT: has no @; give an address, or @ and a domain"),
        ({"redirect_exempt": "@example.org,"}, "PGOUTBOX_REDIRECT_EXEMPT: is empty"),
        ({"redirect_exempt_topics": "mail.*,"}, "PGOUTBOX_REDIRECT_EXEMPT_TOPICS: '' is not a topic"),
        (
            {"redirect_exempt_topics": "@club.example"},
            "PGOUTBOX_REDIRECT_EXEMPT_TOPICS: '@club.example' is not a topic",
        ),
    ],
)
def test_an_invalid_setting_is_refused_by_name(overrides: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        RedirectRules.of(settings_with(**overrides).redirect)


def test_the_target_of_an_operator_takes_precedence_over_the_environment() -> None:
    rules = RedirectRules.of(settings_for("tester@example.org").redirect)
    for switched, target in ((None, "tester@example.org"), ("@example.net", "@example.net")):
        redirect = covering(rules.redirects(switched), "greet")
        assert redirect is not None
        assert redirect.target == target
    with pytest.raises(ConfigurationError, match="target: has no @; give an address, or @ and a domain"):
        rules.redirects("tester")


@pytest.mark.parametrize(
    ("topics", "exempt_topics", "exempt_by_setting", "target"),
    [
        ((), (), None, "operator"),
        (("mail.user.welcome",), (), None, "operator"),
        (("mail.user.*",), (), None, "operator"),
        (("mail.u*", "sms"), (), None, "operator"),
        (("mail.user",), (), None, "setting"),
        (("mail.user.welcome.*",), (), None, "setting"),
        (("mail.club.*",), (), None, "setting"),
        ((), ("mail.club.*",), None, "operator"),
        ((), ("mail.user.*",), None, "setting"),
        (("mail.*",), ("mail.user.*",), None, "setting"),
        (("mail.user.*",), (), "mail.club.*,mail.user.*", None),
        ((), (), "mail.user", "operator"),
    ],
)
def test_a_redirect_covers_its_topics_and_the_setting_the_others(
    topics: tuple[str, ...], exempt_topics: tuple[str, ...], exempt_by_setting: str | None, target: str | None
) -> None:
    rules = RedirectRules.of(settings_for("setting@example.org", redirect_exempt_topics=exempt_by_setting).redirect)
    found = rules.redirects("operator@example.org", topics, exempt_topics)
    redirect = covering(found, "mail.user.welcome")
    assert (redirect and redirect.target) == (target and f"{target}@example.org")


@pytest.mark.parametrize("topic", ["", "*", "Mail", "mail.*.user", "*mail", "a b", "m" * 64, "mail\n", "mail.user**"])
def test_a_text_that_is_not_a_topic_is_refused_by_name(topic: str) -> None:
    error = "is not a topic; give its name, or the beginning of names and "
    with pytest.raises(ConfigurationError, match="^topics: .*" + error):
        check_topics([topic], [])
    with pytest.raises(ConfigurationError, match="^exempt_topics: .*" + error):
        check_topics([], [topic])


def test_a_text_is_not_a_list_of_topics_and_a_list_has_fifty() -> None:
    with pytest.raises(ConfigurationError, match="topics: must be a list of topics, not the text 'mail'"):
        check_topics("mail", [])
    check_topics([f"t{number}" for number in range(50)], [])
    with pytest.raises(ConfigurationError, match="exempt_topics: 51 are more than 50"):
        check_topics([], [f"t{number}" for number in range(51)])
