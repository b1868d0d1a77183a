"""Notifications to systemd by the protocol of sd_notify: one datagram for each change. Does nothing without systemd."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

_PATIENCE_SECONDS: Final = 0.1
VARIABLES: Final = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})


def notify(**fields: str | int) -> bool:
    """Send `NAME=value` lines to $NOTIFY_SOCKET. Return whether they were sent. Never raises.

    notify(READY=1, STATUS="at work")
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    text = "\n".join(f"{name}={value}" for name, value in fields.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(_PATIENCE_SECONDS)
        sender.sendto(text.encode(), address)
        return True
    return False


def watchdog_seconds() -> float | None:
    """Return the interval for watchdog notifications: half of the watchdog's timeout. None without a watchdog."""
    text, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID")
    if not text.isdecimal() or int(text) == 0 or (pid is not None and pid != str(os.getpid())):
        return None
    return int(text) / 2_000_000
