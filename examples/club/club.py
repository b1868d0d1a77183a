"""The mails of a club: a confirmation to each registered member, and a notice to the organisers.

SQL enqueues the messages (enqueue.sql, enqueue.php). Cron starts `pgoutbox worker --once`, which delivers them.
"""

from __future__ import annotations

import os
from typing import Literal

from psycopg.rows import class_row
from pydantic import BaseModel

from pgoutbox import Context, Email, Message, Outbox, RetryPolicy, Skip, Topic


class RegistrationMail(BaseModel):
    """A registration and the kind of its mail. Name and address are looked up when the mail is sent."""

    registration: int
    mail: Literal["member", "organiser"]


class Registration(BaseModel):
    """A row of the club's table."""

    number: int
    name: str
    email: str


# SQL producers do not see this definition, so enqueue.sql and enqueue.php repeat its queue, keys and attempts.
REGISTRATION_MAIL = Topic(
    "mail.registration",
    payload=RegistrationMail,
    queue="mail",
    dedupe_key=lambda p: f"{p.registration}:{p.mail}",
    on_duplicate="ignore",
    owner=lambda p: f"registration-{p.registration}",
    retry=RetryPolicy.steps(60, 300, 900, 3600, max_attempts=10),
)

outbox = Outbox()


@outbox.handler(REGISTRATION_MAIL, transactional=True)
async def write_mail(message: Message[RegistrationMail], ctx: Context) -> Email:
    """Look the registration up and write its mail. Skip the mail if the registration was deleted."""
    wanted = message.payload
    cursor = ctx.connection.cursor(row_factory=class_row(Registration))
    await cursor.execute("SELECT number, name, email FROM registration WHERE number = %s", (wanted.registration,))
    registration = await cursor.fetchone()
    if registration is None:
        raise Skip(f"registration {wanted.registration} was deleted")
    if wanted.mail == "organiser":
        return Email(
            to=os.environ["CLUB_ORGANISERS"],
            subject=f"Registration {registration.number}",
            text=f"{registration.name} <{registration.email}> has registered.\n",
        )
    return Email(
        to=registration.email,
        subject="Your registration",
        text=f"Dear {registration.name},\n\nyour registration has the number {registration.number}.\n",
    )
