"""Ports for the servers of tests."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the ports that the kernel gives to clients: no connection takes a port before its server starts.
_PORTS = range(20_000, 32_000)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port where nothing listens."""
    while True:
        port = random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different ports where nothing listens."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port(host))
    return list(ports)
