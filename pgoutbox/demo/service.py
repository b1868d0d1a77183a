"""The sign-up service: an example of an application with pgoutbox."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

import psycopg
from pydantic import BaseModel

from pgoutbox import Context, Email, Message, Outbox, RetryPolicy, Skip, Topic

Kind = Literal["activation", "password_reset", "organiser_notice"]

WELCOME = "Welcome to the club"
# Seconds instead of minutes, because a demo must be short.
IMPATIENT = RetryPolicy(max_attempts=8, base=0.3, cap=1.0)

TABLES = """
CREATE TABLE person (
    id serial PRIMARY KEY,
    name text NOT NULL,
    email text NOT NULL UNIQUE,
    deleted boolean NOT NULL DEFAULT false
);
CREATE TABLE reset_token (
    message_id bigint NOT NULL,
    attempt_count integer NOT NULL,
    token_hash text NOT NULL
);
"""


class Activation(BaseModel):
    person_id: int
    name: str
    email: str


class PasswordReset(BaseModel):
    person_id: int
    email: str
    request: int


class OrganiserNotice(BaseModel):
    person_id: int
    text: str


ACTIVATION = Topic(
    "mail.activation",
    payload=Activation,
    destination=lambda p: f"mailto:{p.email}",
    dedupe_key=lambda p: f"person:{p.person_id}",
    retry=IMPATIENT,
)
# Only the newest reset of a person counts: the delay gives impatient people time to ask again.
PASSWORD_RESET = Topic(
    "mail.password_reset",
    payload=PasswordReset,
    destination=lambda p: f"mailto:{p.email}",
    coalesce_key=lambda p: f"person:{p.person_id}",
    delay=0.5,
    retry=IMPATIENT,
)
ORGANISER_NOTICE = Topic(
    "mail.organiser_notice",
    payload=OrganiserNotice,
    destination=lambda _: "mailto:organiser@example.org",
    retry=IMPATIENT,
)

outbox = Outbox()


@outbox.handler(ACTIVATION)
async def send_activation(message: Message[Activation], ctx: Context) -> Email:
    """Render the e-mail at every attempt: the link is created here and never stored."""
    await ctx.ensure_lease()
    link = f"https://club.example.org/activate/{secrets.token_urlsafe(16)}"
    return Email(subject=WELCOME, text=f"Hello {message.payload.name},\n\nactivate: {link}\n")


@outbox.handler(PASSWORD_RESET, transactional=True)
async def send_password_reset(message: Message[PasswordReset], ctx: Context) -> Email:
    """Commit the token's hash together with the completion of the message. The token itself is only in the e-mail."""
    token = secrets.token_urlsafe(16)
    await ctx.connection.execute(
        "INSERT INTO reset_token (message_id, attempt_count, token_hash) VALUES (%s, %s, %s)",
        (message.id, message.attempt_count, hashlib.sha256(token.encode()).hexdigest()),
    )
    return Email(
        subject="Your new password",
        text=f"Choose a new password: https://club.example.org/reset/{token}\n(request {message.payload.request})\n",
    )


@outbox.handler(ORGANISER_NOTICE, transactional=True)
async def send_organiser_notice(message: Message[OrganiserNotice], ctx: Context) -> Email:
    """Send the notice, unless its person has left."""
    cursor = await ctx.connection.execute("SELECT deleted FROM person WHERE id = %s", (message.payload.person_id,))
    row = await cursor.fetchone()
    if row is None or row[0]:
        raise Skip("the person has left")
    return Email(subject="Somebody signed up", text=message.payload.text)


@dataclass(frozen=True, slots=True)
class Enqueued:
    """One message of a business transaction, as the application knows it.

    `committed_at` is on the clock of `time.monotonic`, and 0 before the commit.
    """

    id: int
    kind: Kind
    recipient: str
    committed_at: float = 0.0


def sign_up(connection: psycopg.Connection, name: str, email: str) -> list[Enqueued]:
    """Run the business transaction: write the person, the activation mail and the organiser's notice together."""
    row = connection.execute("INSERT INTO person (name, email) VALUES (%s, %s) RETURNING id", (name, email)).fetchone()
    if row is None:
        raise LookupError(f"no id for the person {name}")
    (person_id,) = row
    activation = outbox.on(connection).enqueue(ACTIVATION, Activation(person_id=person_id, name=name, email=email))
    notice = outbox.on(connection).enqueue(
        ORGANISER_NOTICE, OrganiserNotice(person_id=person_id, text=f"{name} signed up.\n")
    )
    return [
        Enqueued(activation.id, "activation", email),
        Enqueued(notice.id, "organiser_notice", "organiser@example.org"),
    ]


def ask_for_reset(connection: psycopg.Connection, email: str, request: int) -> Enqueued:
    """Ask for a new password; a later request of the same person replaces this one."""
    row = connection.execute("SELECT id FROM person WHERE email = %s", (email,)).fetchone()
    if row is None:
        raise LookupError(f"no person has the address {email}")
    reset = outbox.on(connection).enqueue(PASSWORD_RESET, PasswordReset(person_id=row[0], email=email, request=request))
    return Enqueued(reset.id, "password_reset", email)


def leave(connection: psycopg.Connection, email: str) -> None:
    """Remove a person. The handlers of that person's pending messages decide whether to send them."""
    connection.execute("UPDATE person SET deleted = true WHERE email = %s", (email,))
