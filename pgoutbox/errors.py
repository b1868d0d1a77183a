"""The errors that pgoutbox raises, as one tree.

    PgOutboxError
    ├── ConfigurationError      a setting or a registration is invalid; names it
    │   ├── MissingExtraError   an optional dependency is not installed; names the command
    │   └── NotReadyError       a setting is valid, and what it names cannot be used yet
    ├── SchemaError             the schema is missing, too old or damaged; names the command
    ├── TransactionError        the caller's connection is not in a usable transaction
    ├── ArgumentError            an argument of enqueue is invalid; names the field
    ├── DedupeConflictError     a dedupe key was used again with another payload
    ├── UnknownTopicError       a strict outbox has no such topic
    ├── MessageNotFoundError    no message has that id
    ├── StateError              the state of the message or queue forbids the operation
    ├── LeaseLostError          another owner has, or may have, the message
    └── SignatureError          a received webhook has no valid signature

Database errors on the caller's own connection pass through unchanged, unless their SQLSTATE shows that a function of
pgoutbox raised them.
"""

from importlib import import_module


class PgOutboxError(Exception):
    """The base class of all errors of pgoutbox."""


class ConfigurationError(PgOutboxError):
    """A setting, an argument of a registration or the environment is invalid."""


class MissingExtraError(ConfigurationError):
    """A feature needs a package that is not installed. Without an extra, it belongs to the default installation."""

    def __init__(self, feature: str, extra: str | None = None) -> None:
        needs = "a package of the default installation" if extra is None else "an optional dependency"
        name = "pgoutbox" if extra is None else f"'pgoutbox[{extra}]'"
        super().__init__(f"{feature} needs {needs}: pip install {name}")
        self.extra = extra


class NotReadyError(ConfigurationError):
    """A setting is valid, and what it names cannot be used now: a file, a module, a port, a server. It may be later."""


def require_extra(module: str, feature: str, extra: str | None = None) -> None:
    """Import a dependency that may be missing. Raise `MissingExtraError` if it is not installed."""
    try:
        import_module(module)
    except ImportError:
        raise MissingExtraError(feature, extra) from None


class SchemaError(PgOutboxError):
    """The schema `pgoutbox` is missing, damaged, or too old for this version of the package."""


class TransactionError(PgOutboxError):
    """The connection is outside a transaction, or its transaction is aborted."""


class ArgumentError(PgOutboxError, ValueError):
    """An argument of enqueue was refused before any write.

    `field` is the path of the refused value, for example `payload.order.items[3].price`.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class DedupeConflictError(PgOutboxError):
    """Another message with a different payload of the same version has this dedupe key."""


class UnknownTopicError(PgOutboxError, LookupError):
    """The outbox is strict and does not define this topic."""


class MessageNotFoundError(PgOutboxError, LookupError):
    """No message has this id."""


class StateError(PgOutboxError):
    """The state of the message does not allow the operation, or the ceiling of the queue does not."""


class LeaseLostError(PgOutboxError):
    """The attempt no longer owns its message, or the message has been cancelled or superseded, or has expired."""


class SignatureError(PgOutboxError):
    """A received webhook has no valid signature, or its signature is too old."""
