"""An application with topics of every kind, for the tests of command line and dashboard."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from pgoutbox import Context, Message, Outbox, RetryPolicy, SyncContext, Topic

if TYPE_CHECKING:
    from collections.abc import Sequence


class Welcome(BaseModel):
    """The payload of mail.welcome."""

    user_id: int = Field(ge=1)
    email: str = Field(pattern="@", examples=["ada@example.org"])
    language: str = "en"


class Note(BaseModel):
    """The payload of mail.note, with a list of texts."""

    lines: list[str]
    name: str | None


WELCOME = Topic(
    "mail.welcome",
    payload=Welcome,
    queue="critical",
    destination=lambda p: f"mailto:{p.email}",
    dedupe_key=lambda p: f"welcome-{p.user_id}",
    owner=lambda p: f"user-{p.user_id}",
    retry=RetryPolicy.steps(60, 300, max_attempts=4),
    delay=timedelta(minutes=5),
    expires_after=3600,
    redact=("language",),
)
NOTE = Topic("mail.note", payload=Note, destination="mailto:board@example.org", encrypted=True)
LOOSE = Topic("mail.loose", coalesce_key=lambda p: str(p["key"]), max_delay=60)

outbox = Outbox()


@outbox.handler(WELCOME, timeout=30, on_unknown="hold")
async def welcome(message: Message[Welcome], ctx: Context) -> None:
    """Do nothing."""


@outbox.handler(NOTE, transactional=True)
def note(message: Message[Note], ctx: SyncContext) -> None:
    """Do nothing."""


@outbox.batch_handler("search.index", max_size=500, retry=RetryPolicy(max_attempts=2, base=1, cap=8))
async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
    """Do nothing."""


outbox.define(LOOSE)
