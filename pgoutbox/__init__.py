"""pgoutbox: the transactional outbox for Python applications on PostgreSQL."""

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
from pgoutbox.handlers import Context, SyncContext
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

__version__ = "0.1.0"

__all__ = [
    "Attachment",
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
]
