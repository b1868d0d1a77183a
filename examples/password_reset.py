"""A transactional handler: it sends a token by e-mail and stores its hash in the database, in one attempt.

    python -m examples.password_reset
    pgoutbox worker --app examples.password_reset:outbox --once

The handler creates the token at send time, so the database never holds a usable secret. The hash and the completion of
the message commit together. If the attempt fails, its hash is rolled back, and the next attempt sends another token.
"""

from __future__ import annotations

import hashlib
import os
import secrets

import psycopg
from pydantic import BaseModel

from pgoutbox import Context, Email, Message, Outbox, RetryPolicy, Skip, Topic


class PasswordReset(BaseModel):
    """The member. The payload contains no secrets."""

    member_id: int
    email: str


PASSWORD_RESET = Topic(
    "mail.password_reset",
    payload=PasswordReset,
    queue="critical",
    destination=lambda p: f"mailto:{p.email}",
    coalesce_key=lambda p: str(p.member_id),
    retry=RetryPolicy(max_attempts=8, base=1, cap=60),
    expires_after=3600,
)

outbox = Outbox()

TABLES = """
CREATE TABLE IF NOT EXISTS account (
    id bigint PRIMARY KEY,
    email text NOT NULL
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


@outbox.handler(PASSWORD_RESET, transactional=True, timeout=30)
async def send_reset(message: Message[PasswordReset], ctx: Context) -> Email:
    """Check that the account exists, create a token, store its hash, and render the e-mail."""
    member_id = message.payload.member_id
    found = await ctx.connection.execute("SELECT FROM account WHERE id = %s", (member_id,))
    if await found.fetchone() is None:
        raise Skip("the account is gone")
    token = secrets.token_urlsafe(32)
    await ctx.connection.execute(STORE_HASH, (member_id, hash_of(token)))
    await ctx.ensure_lease()
    return Email(subject="Your new password", text=f"https://club.example.org/reset/{token}\n")


def hash_of(token: str) -> str:
    """Return the hash of a token, which the database stores."""
    return hashlib.sha256(token.encode()).hexdigest()


def ask_for_reset(connection: psycopg.Connection, member_id: int, email: str) -> int:
    """Enqueue a reset, in the caller's transaction. A newer one supersedes it. Return the message id."""
    return outbox.enqueue(connection, PASSWORD_RESET, PasswordReset(member_id=member_id, email=email)).id


def main() -> None:
    """Ask twice for Ada's account, and once for an account that does not exist."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute(TABLES)
        connection.execute("INSERT INTO account VALUES (1, 'ada@example.org') ON CONFLICT DO NOTHING")
        for member_id, email in ((1, "ada@example.org"), (1, "ada@example.org"), (2, "gone@example.org")):
            print("message", ask_for_reset(connection, member_id, email), "to", email)


if __name__ == "__main__":
    main()
