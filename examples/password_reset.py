"""Password resets and notices: a token that is created at send time, delivery by SMTP or by a provider's HTTP API.

    python -m examples.password_reset
    pgoutbox worker --app examples.password_reset:outbox --queue critical --once
    python -m examples.password_reset TOKEN

The handler creates the token, so the database never holds a usable secret. The hash and the completion of the message
commit together. If the attempt fails, its hash is rolled back, and the next attempt sends another token. The last
command takes the token from the e-mail and changes the password. Of several resets only the newest is sent, but each
change has its notice.

    pgoutbox list --topic mail.password_reset
    pgoutbox redrive ID
    pgoutbox resend ID

`redrive` refuses a failed reset that a newer one supersedes, and names the newer one. `resend` sends a sent reset
again, with a new token. If MAIL_PROVIDER_URL and MAIL_PROVIDER_KEY are set, the provider of mail_provider.py gets the
e-mail.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from typing import Any

import psycopg
from pydantic import BaseModel

from examples.mail_provider import provider, settings
from pgoutbox import Context, Email, Message, Outbox, RetryPolicy, Skip, Topic


class Member(BaseModel):
    """The payload of both topics. It contains no secrets."""

    member_id: int
    email: str


PASSWORD_RESET = Topic(
    "mail.password_reset",
    payload=Member,
    queue="critical",
    destination=lambda p: f"mailto:{p.email}",
    coalesce_key=lambda p: str(p.member_id),
    retry=RetryPolicy(max_attempts=8, base=1, cap=60),
    expires_after=3600,
)
# Without a coalesce key: a newer notice does not replace an older one.
PASSWORD_CHANGED = Topic(
    "mail.password_changed", payload=Member, queue="critical", destination=lambda p: f"mailto:{p.email}"
)

outbox = Outbox(settings, transports=[provider] if os.environ.get("MAIL_PROVIDER_URL") else [])

TABLES = """
CREATE TABLE IF NOT EXISTS account (
    id bigint PRIMARY KEY,
    email text NOT NULL,
    password_changed_at timestamptz
);
CREATE TABLE IF NOT EXISTS reset_token (
    account_id bigint PRIMARY KEY,
    token_hash text NOT NULL
);
"""

STORE_HASH = """
INSERT INTO reset_token (account_id, token_hash)
VALUES (%s, %s)
ON CONFLICT (account_id) DO UPDATE SET token_hash = EXCLUDED.token_hash
"""

REDEEM = """
DELETE FROM reset_token AS t
USING account AS a
WHERE a.id = t.account_id AND t.token_hash = %s
RETURNING a.id, a.email
"""


@outbox.handler(PASSWORD_RESET, transactional=True, timeout=30)
async def send_reset(message: Message[Member], ctx: Context) -> Email:
    """Check that the account exists, create a token, store its hash, and render the e-mail."""
    member_id = message.payload.member_id
    found = await ctx.connection.execute("SELECT FROM account WHERE id = %s", (member_id,))
    if await found.fetchone() is None:
        raise Skip("the account is gone")
    token = secrets.token_urlsafe(32)
    await ctx.connection.execute(STORE_HASH, (member_id, hash_of(token)))
    await ctx.ensure_lease()
    return Email(subject="Your new password", text=f"https://club.example.org/reset/{token}\n")


@outbox.handler(PASSWORD_CHANGED)
async def send_notice(message: Message[Member], ctx: Context) -> Email:  # noqa: ARG001
    """Render the notice."""
    return Email(subject="Your password was changed", text="If that was not you, call the office.")


def hash_of(token: str) -> str:
    """Return the hash of a token, which the database stores."""
    return hashlib.sha256(token.encode()).hexdigest()


def ask_for_reset(connection: psycopg.Connection[Any], member: Member) -> int:
    """Enqueue a reset, in the caller's transaction. A newer one supersedes it. Return the message id."""
    return outbox.on(connection).enqueue(PASSWORD_RESET, member).id


def change_password(connection: psycopg.Connection[Any], member: Member) -> int:
    """Change the password and enqueue the notice, in the caller's transaction. Return the message id."""
    connection.execute("UPDATE account SET password_changed_at = now() WHERE id = %s", (member.member_id,))
    return outbox.on(connection).enqueue(PASSWORD_CHANGED, member).id


def redeem(connection: psycopg.Connection[Any], token: str) -> bool:
    """Use up a token and change the password, in the caller's transaction. Return False if the token is not valid."""
    used = connection.execute(REDEEM, (hash_of(token),)).fetchone()
    if used is not None:
        change_password(connection, Member(member_id=used[0], email=used[1]))
    return used is not None


def main(*tokens: str) -> None:
    """Redeem the tokens. Without any, ask for three resets, one for an unknown account, and change a password twice."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute(TABLES)
        for token in tokens:
            print("password changed" if redeem(connection, token) else "this token is not valid")
        if not tokens:
            connection.execute("INSERT INTO account VALUES (1, 'ada@example.org') ON CONFLICT DO NOTHING")
            ada, gone = Member(member_id=1, email="ada@example.org"), Member(member_id=2, email="gone@example.org")
            for member in (ada, ada, gone):
                print("reset", ask_for_reset(connection, member), "to", member.email)
            for _ in range(2):
                print("notice", change_password(connection, ada), "to", ada.email)


if __name__ == "__main__":
    main(*sys.argv[1:])
