"""Async SQLAlchemy, on psycopg or asyncpg: an order changes often, and its customer gets an e-mail of the last change.

python -m examples.orders            # or: python -m examples.orders asyncpg
pgoutbox worker --app examples.orders:outbox --once
"""

from __future__ import annotations

import asyncio
import os
import sys

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgoutbox import Context, Email, Message, Outbox, Topic


class Base(DeclarativeBase):
    """The application's models."""


class Order(Base):
    """An order of a customer."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    quantity: Mapped[int]


class OrderChanged(BaseModel):
    """The data for the e-mail."""

    order_id: int
    email: str
    quantity: int


ORDER_CHANGED = Topic(
    "mail.order_changed",
    payload=OrderChanged,
    destination=lambda p: f"mailto:{p.email}",
    coalesce_key=lambda p: str(p.order_id),
)

outbox = Outbox()


@outbox.handler(ORDER_CHANGED)
async def order_changed(message: Message[OrderChanged], ctx: Context) -> Email:
    """Render the e-mail. An older pending change is skipped; `ensure_lease` stops an older one in flight."""
    order = message.payload
    await ctx.ensure_lease()
    return Email(subject=f"Order {order.order_id}", text=f"You will get {order.quantity} of them.")


async def change(session: AsyncSession, order: Order, quantity: int) -> int:
    """Change an order and enqueue an e-mail about it, in the caller's transaction. Return the message id."""
    order.quantity = quantity
    session.add(order)
    await session.flush()  # A new order gets its id here.
    payload = OrderChanged(order_id=order.id, email=order.email, quantity=quantity)
    return (await outbox.on(session).enqueue(ORDER_CHANGED, payload)).id


async def main(driver: str = "psycopg") -> None:
    """Change one order three times, each in its own transaction."""
    url = os.environ["PGOUTBOX_DSN"].replace("postgresql://", f"postgresql+{driver}://", 1)
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine, expire_on_commit=False) as session:
        order = Order(email="ada@example.org", quantity=0)
        for quantity in (1, 2, 3):
            async with session.begin():
                message_id = await change(session, order, quantity)
            print(f"quantity {quantity}: message {message_id}")
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
