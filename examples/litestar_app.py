"""Litestar and SQLAlchemy async, with a worker in the same process.

uvicorn litestar_app:app
curl --json '{"email": "ada@example.org"}' http://127.0.0.1:8000/members
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from litestar import Litestar, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgoutbox import Context, Email, Message, Outbox, lifespan

outbox = Outbox()
sessions = async_sessionmaker[AsyncSession]()


class Base(DeclarativeBase):
    """The tables of the application."""


class Member(Base):
    """A member of the club."""

    __tablename__ = "member"
    email: Mapped[str] = mapped_column(primary_key=True)


class NewMember(BaseModel):
    email: str


@outbox.handler("mail.welcome")
async def welcome(message: Message, ctx: Context) -> Email:
    """Render the e-mail to the message's destination."""
    await ctx.ensure_lease()
    return Email(subject="Welcome", text=f"Good to have you in the club. (This is e-mail {message.id}.)")


async def get_session() -> AsyncGenerator[AsyncSession]:
    """Open a session. Litestar commits it after the route handler, before it sends the answer."""
    async with sessions.begin() as session:
        yield session


@asynccontextmanager
async def connect(_: Litestar) -> AsyncGenerator[None]:
    """Connect to the database while the application runs."""
    engine = create_async_engine(os.environ["DATABASE_URL"])
    sessions.configure(bind=engine)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


@post("/members")
async def join(data: JSONBody[NewMember], session: NamedDependency[AsyncSession]) -> None:
    """Add a member and enqueue the welcome, in one transaction."""
    session.add(Member(email=data.email))
    await outbox.on(session).enqueue("mail.welcome", None, destination=f"mailto:{data.email}")


app = Litestar([join], dependencies={"session": get_session}, lifespan=[connect, lifespan(outbox)])
