"""pgoutbox: the transactional outbox for Python applications on PostgreSQL.

Import from this package, and from the modules in `PUBLIC_MODULES`. All other modules are private: they change without
notice. A test checks that examples and how-to pages import from public modules only.
"""

from typing import TYPE_CHECKING

from pgoutbox.enqueue.calls import Cancelled, CancelResult, Enqueued, EnqueuedMany, RescheduleResult
from pgoutbox.enqueue.owned import EditResult, OwnedMessage
from pgoutbox.enqueue.producer import AsyncProducer, Producer
from pgoutbox.enqueue.validation import Draft
from pgoutbox.errors import (
    ArgumentError,
    ConfigurationError,
    DedupeConflictError,
    LeaseLostError,
    MessageNotFoundError,
    MissingExtraError,
    NotReadyError,
    PgOutboxError,
    SchemaError,
    SignatureError,
    StateError,
    TransactionError,
    UnknownTopicError,
)
from pgoutbox.handlers import CallNext, Context, Middleware, SyncContext
from pgoutbox.message import (
    Failure,
    Message,
    Outcome,
    Permanent,
    SendFailure,
    Sent,
    Skip,
    Snooze,
    State,
    Transient,
    Unavailable,
)
from pgoutbox.outbox import Outbox
from pgoutbox.retry import RetryPolicy
from pgoutbox.schedules import Every
from pgoutbox.settings import Settings, load_settings
from pgoutbox.topics import NewMessage, Recipient, Topic
from pgoutbox.transports.apprise import Notification
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.transports.smtp.mail import Attachment, Email, RawEmail
from pgoutbox.transports.smtp.templates import Templates
from pgoutbox.transports.webhook.request import Webhook

if TYPE_CHECKING:
    from pgoutbox.operations import Operator
    from pgoutbox.worker import MultiWorker, Worker, asend_directly, lifespan, send_directly

# Public modules, besides this one. Most applications need none of them.
PUBLIC_MODULES = (
    "pgoutbox.contrib.django",
    "pgoutbox.contrib.django.test",
    "pgoutbox.dashboard",
    "pgoutbox.doctor",
    "pgoutbox.embedded",
    "pgoutbox.migrate",
    "pgoutbox.observability",
    "pgoutbox.operations",
    "pgoutbox.testing",
    "pgoutbox.transports",
    "pgoutbox.unsubscribe",
    "pgoutbox.webhooks",
)

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AsyncProducer",
    "Attachment",
    "CallNext",
    "CancelResult",
    "Cancelled",
    "CloudEvent",
    "ConfigurationError",
    "Context",
    "DedupeConflictError",
    "Draft",
    "EditResult",
    "Email",
    "Enqueued",
    "EnqueuedMany",
    "Every",
    "Failure",
    "LeaseLostError",
    "Message",
    "MessageNotFoundError",
    "Middleware",
    "MissingExtraError",
    "MultiWorker",
    "NewMessage",
    "NotReadyError",
    "Notification",
    "Operator",
    "Outbox",
    "Outcome",
    "OwnedMessage",
    "Permanent",
    "PgOutboxError",
    "Producer",
    "RawEmail",
    "Recipient",
    "RescheduleResult",
    "RetryPolicy",
    "SchemaError",
    "SendFailure",
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
    "asend_directly",
    "lifespan",
    "load_settings",
    "send_directly",
]


def __getattr__(name: str) -> object:
    # A process that only enqueues loads none of them.
    if name == "Operator":
        from pgoutbox.operations import Operator

        return Operator
    if name in ("MultiWorker", "Worker", "asend_directly", "lifespan", "send_directly"):
        from pgoutbox import worker

        return getattr(worker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
