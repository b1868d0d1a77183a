"""FastAPI: a web application that delivers its own messages, with a worker in its lifespan.

uvicorn examples.web_app:app
curl --json '{"email": "ada@example.org"}' http://127.0.0.1:8000/members
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import psycopg
from fastapi import FastAPI
from pydantic import BaseModel

from pgoutbox import Context, Email, Message, Outbox, Worker

logger = logging.getLogger("club")
outbox = Outbox()


class Member(BaseModel):
    """The body of a request."""

    email: str


@outbox.handler("mail.welcome")
async def welcome(message: Message, ctx: Context) -> Email:
    """Render the e-mail to the message's destination."""
    await ctx.ensure_lease()
    return Email(subject="Welcome", text=f"Good to have you in the club. (This is e-mail {message.id}.)")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    """Run a worker while the application runs."""
    worker = Worker(outbox)
    running = asyncio.create_task(worker.run())
    running.add_done_callback(end_process_after_failure)
    try:
        yield
    finally:
        worker.stop()
        await asyncio.wait([running])  # Handlers get PGOUTBOX_SHUTDOWN_GRACE_SECONDS to end.


def end_process_after_failure(running: asyncio.Task[None]) -> None:
    """End a process that could only enqueue, so that its supervisor restarts it."""
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.critical("the worker failed", exc_info=error)
        signal.raise_signal(signal.SIGTERM)


app = FastAPI(lifespan=lifespan)


@app.post("/members", status_code=201)
async def join(member: Member) -> None:
    """Add a member and enqueue the welcome, in one transaction."""
    async with await psycopg.AsyncConnection.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        await connection.execute("CREATE TABLE IF NOT EXISTS member (email text PRIMARY KEY)")
        await connection.execute("INSERT INTO member (email) VALUES (%s) ON CONFLICT DO NOTHING", (member.email,))
        await outbox.aenqueue(
            connection, "mail.welcome", None, destination=f"mailto:{member.email}", dedupe_key=member.email
        )
