"""psycopg: insert a member and enqueue a welcome e-mail in one transaction.

python -m examples.sign_up
pgoutbox worker --app examples.sign_up:outbox --once
"""

from __future__ import annotations

import os

import psycopg

from pgoutbox import CancelResult, Context, Email, Message, Outbox

outbox = Outbox()


@outbox.handler("mail.welcome")
async def welcome(message: Message, ctx: Context) -> Email:
    """Render the e-mail to the message's destination. `ensure_lease` raises if the member has left."""
    await ctx.ensure_lease()
    return Email(subject="Welcome", text=f"Good to have you in the club. (This is e-mail {message.id}.)")


def create_tables(connection: psycopg.Connection) -> None:
    """Create the club's only table."""
    connection.execute("CREATE TABLE IF NOT EXISTS member (email text PRIMARY KEY)")


def join(connection: psycopg.Connection, email: str) -> bool:
    """Add a member and enqueue a welcome. Return False if both exist already. The caller commits."""
    connection.execute("INSERT INTO member (email) VALUES (%s) ON CONFLICT DO NOTHING", (email,))
    enqueued = outbox.on(connection).enqueue(
        "mail.welcome", {"email": email}, destination=f"mailto:{email}", dedupe_key=email
    )
    return not enqueued.duplicate


def leave(connection: psycopg.Connection, email: str) -> CancelResult:
    """Remove a member and cancel the welcome. The caller commits."""
    connection.execute("DELETE FROM member WHERE email = %s", (email,))
    return outbox.on(connection).cancel(topic="mail.welcome", dedupe_key=email)


def main() -> None:
    """Let three people join, one of them twice. One leaves, and one changes their mind before the commit."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        create_tables(connection)
        for email in ("ada@example.org", "bob@example.org", "ada@example.org"):
            print(email, "joined" if join(connection, email) else "was here before")
        connection.commit()

        print("bob@example.org left, the welcome is", leave(connection, "bob@example.org").value)
        connection.commit()

        join(connection, "cid@example.org")
        connection.rollback()
        print("cid@example.org changed their mind")


if __name__ == "__main__":
    main()
