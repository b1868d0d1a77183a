"""pgoutbox: the transactional outbox for Python applications on PostgreSQL."""

from typing import TYPE_CHECKING

from pgoutbox.errors import (
    ConfigurationError,
    DuplicateError,
    LeaseLostError,
    MessageNotFoundError,
    MissingExtraError,
    PayloadError,
    PgOutboxError,
    SchemaError,
    SignatureError,
    StateError,
    TransactionError,
    UnknownTopicError,
)
from pgoutbox.handlers import CallNext, Context, Middleware, SyncContext
from pgoutbox.message import Message, Permanent, Sent, Skip, Snooze, State, Transient, Unavailable
from pgoutbox.outbox import Outbox
from pgoutbox.retry import RetryPolicy
from pgoutbox.settings import Settings
from pgoutbox.steps import CancelResult, Enqueued, EnqueuedMany
from pgoutbox.topics import NewMessage, Topic
from pgoutbox.transports.apprise import Notification
from pgoutbox.transports.events import Event
from pgoutbox.transports.mail import Attachment, Email
from pgoutbox.transports.request import Webhook
from pgoutbox.transports.templates import Templates

if TYPE_CHECKING:
    from pgoutbox.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "Attachment",
    "CallNext",
    "CancelResult",
    "ConfigurationError",
    "Context",
    "DuplicateError",
    "Email",
    "Enqueued",
    "EnqueuedMany",
    "Event",
    "LeaseLostError",
    "Message",
    "MessageNotFoundError",
    "Middleware",
    "MissingExtraError",
    "NewMessage",
    "Notification",
    "Outbox",
    "PayloadError",
    "Permanent",
    "PgOutboxError",
    "RetryPolicy",
    "SchemaError",
    "Sent",
    "Settings",
    "SignatureError",
    "Skip",
    "Snooze",
    "State",
    "StateError",
    "SyncContext",
    "Templates",
    "Topic",
    "TransactionError",
    "Transient",
    "Unavailable",
    "UnknownTopicError",
    "Webhook",
    "Worker",
]


def __getattr__(name: str) -> object:
    # A process that only enqueues does not load the worker.
    if name == "Worker":
        from pgoutbox.worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
