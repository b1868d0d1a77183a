"""Log events, metrics, traces, and the health of a worker. `Exposition` serves the metrics from another web server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgoutbox.observability.prometheus import Exposition, Page

__all__ = ["Exposition", "Page"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pgoutbox.observability import prometheus

    return getattr(prometheus, name)
