"""Every error that pgoutbox raises by itself, as one tree.

    PgOutboxError
    ├── ConfigurationError      a setting or a registration is wrong; names it
    │   └── MissingExtraError   an optional dependency is not installed; names the command
    ├── SchemaError             the schema is missing, too old or damaged; names the command
    ├── TransactionError        the caller's connection is not in a usable transaction
    ├── PayloadError            an argument of enqueue is wrong; names the field
    ├── DedupeConflictError     a dedupe key was used again with another payload
    ├── UnknownTopicError       a strict outbox has no such topic
    ├── MessageNotFoundError    no message has that id
    ├── StateError              the message is in a state that forbids the operation
    ├── LeaseLostError          another owner has, or may have, the message
    └── SignatureError          a webhook that was received is not signed as it must be

Errors of the database driver on the caller's own connection pass through untouched, unless SQLSTATE says that
pgoutbox itself raised them.
"""


class PgOutboxError(Exception):
    """The root of the tree: catch it to catch everything that pgoutbox raises."""


class ConfigurationError(PgOutboxError):
    """A setting, an argument of a registration or the environment is wrong."""


class MissingExtraError(ConfigurationError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: pip install 'pgoutbox[{extra}]'")
        self.extra = extra


class SchemaError(PgOutboxError):
    """The schema `pgoutbox` is missing or older than this version of the package needs."""


class TransactionError(PgOutboxError):
    """The connection is outside a transaction, or its transaction is aborted."""


class PayloadError(PgOutboxError, ValueError):
    """An argument of enqueue was refused before anything was written.

    `field` is the path of what was refused, for example `payload.order.items[3].price`.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class DedupeConflictError(PgOutboxError):
    """The dedupe key is taken by a message with another payload."""


class UnknownTopicError(PgOutboxError, LookupError):
    """The outbox is strict and nobody defined this topic."""


class MessageNotFoundError(PgOutboxError, LookupError):
    """No message has this id."""


class StateError(PgOutboxError):
    """The message is in a state in which the operation is refused."""


class LeaseLostError(PgOutboxError):
    """The attempt no longer owns its message, or the message was cancelled or superseded meanwhile."""


class SignatureError(PgOutboxError):
    """A webhook that was received carries no signature that holds, or an old one."""
