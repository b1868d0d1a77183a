"""Tests the judgement of the answers of real mail servers, by the step at which they come."""

from __future__ import annotations

import pytest

from pgoutbox.transports.smtp.refusals import Cause, Refusal, cause_of

ME = "club@club.test"
ADA = "ada@x.test"

SERVER, SENDER, LIMIT, LATER = Cause.SERVER, Cause.SENDER, Cause.LIMIT, Cause.LATER
RECIPIENT, EMAIL, UNCLEAR, CONNECTION = Cause.RECIPIENT, Cause.EMAIL, Cause.UNCLEAR, Cause.CONNECTION

ANSWERS = [
    # The dialogue before the e-mail.
    ("connect", "421 4.3.2 busy", CONNECTION),
    ("connect", "421 4.7.0 mx.club.test Error: too many connections from 192.0.2.1", LIMIT),
    ("connect", "554 5.7.1 Service unavailable; Client host [192.0.2.7] blocked using zen.example.org", SERVER),
    ("EHLO", "550 5.7.1 not for you", SERVER),
    ("STARTTLS", "454 4.7.0 TLS not available due to local problem", CONNECTION),
    ("STARTTLS", "502 not implemented", SERVER),
    ("AUTH", "535 5.7.8 Error: authentication failed", SERVER),
    ("AUTH", "454 4.7.0 Temporary authentication failure", CONNECTION),
    # Postfix, which delays refusals to RCPT.
    ("RCPT", f"554 5.7.1 <{ADA}>: Relay access denied", SERVER),
    ("RCPT", f"454 4.7.1 <{ADA}>: Relay access denied", SERVER),
    ("RCPT", f"553 5.7.1 <{ME}>: Sender address rejected: not owned by user club", SENDER),
    ("RCPT", f"553 5.7.1 <{ME}>: Sender address rejected: not logged in", SENDER),
    ("RCPT", f"554 5.7.1 <{ME}>: Sender address rejected: Access denied", SENDER),
    ("RCPT", f"450 4.1.8 <{ME}>: Sender address rejected: Domain not found", SENDER),
    ("RCPT", f"550 5.1.8 <{ME}>: Sender address rejected: Domain not found", SENDER),
    ("RCPT", "554 5.7.1 <host.test[192.0.2.7]>: Client host rejected: Access denied", SERVER),
    ("RCPT", "450 4.7.25 Client host rejected: cannot find your hostname, [192.0.2.7]", SENDER),
    ("RCPT", "504 5.5.2 <bare>: Helo command rejected: need fully-qualified hostname", SERVER),
    ("RCPT", "450 4.7.1 <bare>: Helo command rejected: Host not found", SERVER),
    ("RCPT", "554 5.7.1 Service unavailable; Client host [192.0.2.7] blocked using zen.example.org", SERVER),
    ("RCPT", "450 4.7.1 Error: too much mail from 192.0.2.7", LIMIT),
    ("RCPT", "450 4.7.1 Error: too many recipients from 192.0.2.7", LIMIT),
    ("RCPT", f"450 4.2.0 <{ADA}>: Recipient address rejected: Greylisted, see http://postgrey.example.org", LATER),
    ("RCPT", f"450 4.7.1 <{ME}>: Sender address rejected: Greylisted", LATER),
    ("RCPT", f"550 5.1.1 <{ADA}>: Recipient address rejected: User unknown in local recipient table", RECIPIENT),
    ("RCPT", f"450 4.1.1 <{ADA}>: Recipient address rejected: unverified address", LATER),
    ("RCPT", f"554 5.7.1 <{ADA}>: Recipient address rejected: Access denied", UNCLEAR),
    ("MAIL", "552 5.3.4 Message size exceeds fixed limit", EMAIL),
    ("DATA", "552 5.3.4 Error: message file too big", EMAIL),
    ("DATA", "452 4.3.1 Insufficient system storage", UNCLEAR),
    ("MAIL", "451 4.3.0 Error: queue file write error", UNCLEAR),
    ("RCPT", f"451 4.3.0 <{ADA}>: Temporary lookup failure", UNCLEAR),
    ("RCPT", "451 4.3.5 Server configuration error", UNCLEAR),
    ("MAIL", "451 4.7.1 Service unavailable - try again later", UNCLEAR),
    ("RCPT", f"454 4.7.1 <{ADA}>: Recipient address rejected: Access denied", UNCLEAR),
    ("RCPT", f"450 4.2.0 <{ADA}>: Recipient address rejected: come back", LATER),
    ("RCPT", f"550 5.1.1 <{ME}>: Sender address rejected: User unknown in local recipient table", SENDER),
    # Exim.
    ("RCPT", "550 relay not permitted", SERVER),
    ("RCPT", "550 Sender verify failed", SENDER),
    ("RCPT", "550 Unrouteable address", RECIPIENT),
    ("RCPT", f"550 Verification failed for <{ME}> Unrouteable address Sender verify failed", SENDER),
    ("RCPT", "550 Administrative prohibition", UNCLEAR),
    ("RCPT", "550 SMTP AUTH is required for message submission on port 587", SERVER),
    ("RCPT", "550 authentication required", SERVER),
    ("RCPT", "550 Unknown user", RECIPIENT),
    ("MAIL", "552 Message size exceeds maximum permitted", EMAIL),
    ("RCPT", "451 greylisted, please try again later", LATER),
    ("RCPT", "451 Temporary local problem - please try later", UNCLEAR),
    ("RCPT", "452 mailbox is full", LATER),
    ("RCPT", "550 Domain club.test has exceeded the max emails per hour (60/60 (100%)) allowed", LIMIT),
    # Exchange and Exchange Online.
    ("RCPT", "550 5.7.54 SMTP; Unable to relay recipient in non-accepted domain", SERVER),
    ("MAIL", "530 5.7.57 SMTP; Client was not authenticated to send anonymous mail during MAIL FROM", SERVER),
    ("RCPT", "550 5.7.1 Unable to relay", SERVER),
    ("DATA", "550 5.7.60 SMTP; Client does not have permissions to send as this sender", SENDER),
    ("DATA", "554 5.2.252 SendAsDenied", SENDER),
    ("RCPT", "550 5.4.1 Recipient address rejected: Access denied", RECIPIENT),
    ("RCPT", "550 5.7.606 Access denied, banned sending IP [192.0.2.7]", SERVER),
    ("DATA", "550 5.7.705 Access denied, tenant has exceeded threshold", LIMIT),
    ("RCPT", "451 4.7.500 Server busy. Please try again later from [192.0.2.7].", UNCLEAR),
    ("RCPT", "450 4.7.650 The mail server [192.0.2.7] has been temporarily rate limited", LIMIT),
    ("DATA", "550 5.7.501 Access denied, spam abuse detected", SERVER),
    ("DATA", "550 5.7.502 Access denied, banned sender", SERVER),
    ("RCPT", "550 5.7.133 SenderNotAuthenticatedForGroup; authentication required", RECIPIENT),
    ("DATA", "550 5.1.90 You have reached your daily limit for message recipients", LIMIT),
    ("RCPT", "550 5.1.10 RESOLVER.ADR.RecipientNotFound; Recipient not found by SMTP address lookup", RECIPIENT),
    ("RCPT", "452 4.5.3 Too many recipients", LIMIT),
    # Gmail, SES, SendGrid and others.
    ("DATA", "550 5.4.5 Daily user sending limit exceeded", LIMIT),
    ("RCPT", "452 4.2.2 The email account that you tried to reach is over quota", LATER),
    ("RCPT", "552 5.2.2 The email account that you tried to reach is over quota", LATER),
    ("RCPT", "552 Quota exceeded", LATER),
    ("RCPT", f"552 <{ADA}>: Quota exceeded (mailbox for user is full)", LATER),
    ("DATA", "554 Sending quota exceeded", LIMIT),
    ("RCPT", "450 4.2.1 The user you are trying to contact is receiving mail at a rate that prevents more", LATER),
    ("DATA", "550 5.7.26 This mail is unauthenticated, which poses a security risk to the sender", SENDER),
    ("DATA", "550 5.7.1 Message likely unsolicited: very low reputation of the sending domain", SERVER),
    ("DATA", f"554 Message rejected: Email address is not verified. The identities failed the check: {ME}", SENDER),
    ("DATA", "454 Throttling failure: Maximum sending rate exceeded.", LIMIT),
    ("DATA", "454 Throttling failure: Daily message quota exceeded.", LIMIT),
    ("DATA", "550 The from address does not match a verified Sender Identity", SENDER),
    ("DATA", "550 5.7.1 From header does not match the account", SENDER),
    ("RCPT", "550 5.7.1 too many messages", LIMIT),
    ("DATA", "554 5.7.0 rate limit exceeded", LIMIT),
    ("MAIL", "552 5.7.0 quota", LIMIT),
    ("MAIL", f"550 5.7.1 <{ME}> exceeded 60 messages per hour", LIMIT),
    ("MAIL", "451 4.7.0 Rate limit exceeded, try again in an hour", LIMIT),
    # qmail and sendmail.
    ("RCPT", "553 sorry, that domain isn't in my list of allowed rcpthosts (#5.7.1)", SERVER),
    ("RCPT", f"550 5.7.1 {ADA}... Relaying denied", SERVER),
    ("RCPT", f"550 5.1.1 {ADA}... User unknown", RECIPIENT),
    ("RCPT", "550 sorry, no mailbox here by that name (#5.1.1)", RECIPIENT),
    # Codes without words that say more.
    ("MAIL", "530 authenticate first", SERVER),
    ("MAIL", "503 5.5.4 AUTH first", SERVER),
    ("MAIL", "538 encrypt first", SERVER),
    ("MAIL", "553 sorry", SENDER),
    ("MAIL", "550 5.1.1 User unknown", SENDER),
    ("MAIL", "501 5.5.4 Invalid Address", SENDER),
    ("MAIL", "550 5.7.1 not from you", SENDER),
    ("MAIL", "552 no", EMAIL),
    ("MAIL", "555 5.5.4 unknown option", EMAIL),
    ("MAIL", "550 5.6.7 not in this encoding", EMAIL),
    ("MAIL", "451 4.7.1 this sender must wait", UNCLEAR),
    ("MAIL", "451 5.7.3 STARTTLS is required", SERVER),
    ("MAIL", "550 4.7.1 says two things", UNCLEAR),
    ("RCPT", "421 4.4.5 busy", CONNECTION),
    ("RCPT", "421 4.7.0 Too many messages from your account", LIMIT),
    ("RCPT", "550 5.7.13 disabled", SERVER),
    ("RCPT", "550 5.7.1 no", UNCLEAR),
    ("RCPT", "554 no", UNCLEAR),
    ("RCPT", "503 5.5.1 MAIL first", UNCLEAR),
    ("RCPT", "552 no", LATER),
    ("RCPT", "550 5.2.2 no", LATER),
    ("RCPT", "550 5.2.21 not the code of a full mailbox", UNCLEAR),
    ("RCPT", "450 5.7.1 greylisted", LATER),
    ("DATA", "554 5.5.1 no valid recipients", UNCLEAR),
    ("DATA", "554 5.7.1 spam", EMAIL),
    ("DATA", "550 High probability of spam", EMAIL),
    ("DATA", "554 5.7.1 Blocked: known spam source", UNCLEAR),
    ("RCPT", "554 5.7.1 spam", UNCLEAR),
    ("DATA", "550 5.7.23 SPF", SENDER),
    ("DATA", "252 perhaps", UNCLEAR),
    ("connect", "554 mx.test no service here", SERVER),
    ("EHLO", "451 4.3.0 not today", CONNECTION),
    ("MAIL", "421 4.7.0 too many connections", LIMIT),
    ("MAIL", "501 5.1.7 bad sender address", SENDER),
    ("MAIL", "550 5.7.60 may not send as this sender", SENDER),
    ("MAIL", "530 5.7.0 authentication required", SERVER),
    ("MAIL", "503 authenticate first", SERVER),
    ("MAIL", "451 4.7.1 greylisted", LATER),
    ("RCPT", "550 5.7.54 Unable to relay", SERVER),
    ("RCPT", "550 no", UNCLEAR),
    ("RCPT", "450 4.2.1 this mailbox is busy", LATER),
    ("DATA", "554 5.7.1 refused by policy", UNCLEAR),
    ("DATA", "451 4.6.0 this content must wait", LATER),
]


@pytest.mark.parametrize(("step", "answer", "cause"), ANSWERS)
def test_the_cause_of_each_known_answer(step: str, answer: str, cause: Cause) -> None:
    code, _, text = answer.partition(" ")
    recipient = ADA if step == "RCPT" else ""
    assert cause_of(Refusal(step, int(code), text, ME, recipient)) is cause


@pytest.mark.parametrize("answer", ["452 4.5.3 Too many recipients", "452 too many recipients", "550 5.5.3 enough"])
def test_too_many_recipients_are_the_fault_of_an_email_if_others_were_accepted(answer: str) -> None:
    code, _, text = answer.partition(" ")
    refusal = Refusal("RCPT", int(code), text, ME, ADA)
    assert cause_of(refusal) is LIMIT
    assert cause_of(refusal._replace(has_accepted_others=True)) is EMAIL


@pytest.mark.parametrize(
    "address", ["relay@x.test", "spam@limit.test", "too.many.messages@quota.test", "sender@rejected.test"]
)
def test_words_in_a_quoted_address_decide_nothing(address: str) -> None:
    for quoted in (f"<{address}>", address):
        assert cause_of(Refusal("RCPT", 550, f"5.7.1 {quoted}: no", ME, address)) is UNCLEAR


def test_an_answer_about_the_sender_to_itself_is_not_judged_by_the_quoted_address() -> None:
    """The doctor names the sender as the recipient."""
    assert cause_of(Refusal("RCPT", 550, f"5.1.1 <{ME}>: User unknown", ME, ME)) is RECIPIENT
    assert cause_of(Refusal("RCPT", 554, f"5.7.1 <{ME}>: no", ME, ME)) is UNCLEAR
    assert cause_of(Refusal("RCPT", 553, f"5.7.1 <{ME}>: Sender address rejected: not owned", ME, ME)) is SENDER


def test_a_quoted_sender_beside_other_addresses_decides_nothing() -> None:
    for text in (f"5.1.1 <{ADA}>: User unknown (from <{ME}>)", f"5.1.1 {ME} -> {ADA}: no such user"):
        for step in ("RCPT", "DATA"):
            assert cause_of(Refusal(step, 550, text, ME, ADA if step == "RCPT" else "")) is RECIPIENT
