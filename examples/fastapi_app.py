"""FastAPI and SQLAlchemy async, with a worker in the same process.

uvicorn fastapi_app:app
curl --json '{"email": "ada@example.org"}' http://127.0.0.1:8000/members
"""

import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Body, Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgoutbox import Context, Email, Message, Outbox, lifespan

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

outbox = Outbox()
sessions = async_sessionmaker[AsyncSession]()


class Base(DeclarativeBase):
    """The tables of the application."""


class Member(Base):
    """A member of the club."""

    __tablename__ = "member"
    email: Mapped[str] = mapped_column(primary_key=True)


@outbox.handler("mail.welcome")
async def welcome(message: Message, ctx: Context) -> Email:
    """Render the e-mail to the message's destination."""
    await ctx.ensure_lease()
    return Email(subject="Welcome", text=f"Good to have you in the club. (This is e-mail {message.id}.)")


async def get_session() -> AsyncGenerator[AsyncSession]:
    """Open a session, and commit it after the endpoint."""
    async with sessions.begin() as session:
        yield session


@asynccontextmanager
async def run(app: FastAPI) -> AsyncGenerator[None]:
    """Connect to the database, and run a worker while the application runs."""
    engine = create_async_engine(os.environ["DATABASE_URL"])
    sessions.configure(bind=engine)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with lifespan(outbox)(app):
        yield
    await engine.dispose()


app = FastAPI(lifespan=run)
# With `scope="function"` FastAPI commits before it sends the answer. Without it a failed commit is answered with 201.
Session = Annotated[AsyncSession, Depends(get_session, scope="function")]


@app.post("/members", status_code=201)
async def join(email: Annotated[str, Body(embed=True)], session: Session) -> None:
    """Add a member and enqueue the welcome, in one transaction."""
    session.add(Member(email=email))
    await outbox.on(session).enqueue("mail.welcome", None, destination=f"mailto:{email}")
