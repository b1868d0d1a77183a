"""The allowed targets of webhooks: accepted URLs and addresses. Pure: resolves nothing.

A tenant's URL must never lead into the operator's own network. The address of a name is only known after resolving it.
So the guard checks addresses, and callers must dial the checked address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import (
    AddressValueError,
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent
from pgoutbox.options import DOMAIN
from pgoutbox.transports import WEB_PORTS
from pgoutbox.transports.checks import require_text

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_URL_LENGTH = 2_048

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?]*)(?P<target>[/?].*)?")
_AUTHORITY = re.compile(r"(?:\[(?P<literal>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::(?P<port>[0-9]{0,5}))?")
_UNFIT = re.compile(r'[^!-~]|["<>\\^`{|}]')
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")

_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = IPv6Network("2000::/3")

# The special-purpose registries of IANA, because the `is_global` of older Python releases knows fewer of them, and the
# networks that embed IPv4 addresses (6to4, Teredo). The last one is public, but leads to Azure's own host.
_NOT_PUBLIC: Sequence[Network] = [
    ip_network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "168.63.129.16/32",
    )
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of a URL: the host to dial, the name in the certificate, and the request target."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def origin(self) -> tuple[str, str, int]:
        """Requests with the same origin may share a connection."""
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """The value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == WEB_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UrlPolicy:
    """The schemes, ports and networks that webhooks may use."""

    ports: frozenset[int] = frozenset({443, 8443})
    allow_http: bool = False
    allowed_networks: tuple[Network, ...] = ()

    def endpoint(self, field: str, url: object) -> Endpoint:
        """Return the parts of a URL. Raises `Permanent`, naming the field but not the URL: it may contain a secret."""
        url = require_text(field, url)
        return _endpoint(field, url, self.ports, allow_http=self.allow_http)

    def allows(self, text: str) -> bool:
        """Whether this resolved address may be dialled: it is public, or its network is allowed."""
        try:
            address = ip_address(text)
        except ValueError:
            return False
        inner = embedded_address(address)
        if any(candidate in network for network in self.allowed_networks for candidate in (address, inner)):
            return True
        return is_public(inner)


def embedded_address(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address embeds, if packets reach it; else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(int(address) & 0xFFFF_FFFF) if address in _NAT64 else address


def is_public(address: Address) -> bool:
    """Whether an address belongs to one host in the public internet. 6to4 and Teredo, which embed others, do not."""
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not any(address in network for network in _NOT_PUBLIC)


@lru_cache(1_024)  # Many messages go to the same URL.
def _endpoint(field: str, url: str, ports: frozenset[int], *, allow_http: bool) -> Endpoint:
    if len(url) > MAX_URL_LENGTH:
        raise Permanent(f"{field}: has {len(url)} characters, the limit is {MAX_URL_LENGTH}")
    if found := _UNFIT.search(url):
        raise Permanent(f"{field}: contains the character U+{ord(found[0]):04X}; percent-encode it")
    if "#" in url:
        raise Permanent(f"{field}: a fragment (#) is never sent; leave it out")
    parts = _URL.fullmatch(url)
    scheme = parts["scheme"].lower() if parts else ""
    if parts is None or scheme not in WEB_PORTS:
        raise Permanent(f"{field}: must begin with https://")
    if scheme == "http" and not allow_http:
        raise Permanent(f"{field}: http is refused; use https, or set PGOUTBOX_WEBHOOK_ALLOW_HTTP")
    if "@" in parts["authority"]:
        raise Permanent(f"{field}: a user name or password in a URL is refused; send a header instead")
    authority = _AUTHORITY.fullmatch(parts["authority"])
    if authority is None:
        raise Permanent(f"{field}: has no valid host and port")
    host = _host(field, authority["name"], authority["literal"])
    port = int(authority["port"] or WEB_PORTS[scheme])
    if port not in ports:
        known = ", ".join(map(str, sorted(ports)))
        raise Permanent(f"{field}: port {port} is refused; PGOUTBOX_WEBHOOK_PORTS allows {known}")
    target = parts["target"] or "/"
    return Endpoint(scheme, host, port, target if target.startswith("/") else f"/{target}")


def _host(field: str, name: str | None, literal: str | None) -> str:
    host = (name or literal or "").lower()
    if host.endswith("."):
        raise Permanent(f"{field}: the host must not end with a dot")
    try:
        if literal is not None:
            # A zone, after %, would name an interface of this machine.
            return str(IPv6Address(host.replace("%", "/")))
        if _NUMBER.fullmatch(host):
            # Other programs read it as an address in octal, in hexadecimal or with fewer dots.
            return str(IPv4Address(host))
    except AddressValueError:
        what = "is not an IPv6 address" if literal is not None else "is a number, and not an address of four parts"
        raise Permanent(f"{field}: the host {what}") from None
    if not DOMAIN.fullmatch(host) or len(host) > 253:
        raise Permanent(f"{field}: has no host name that can be looked up")
    return host


def parse_ports(variable: str, text: str) -> frozenset[int]:
    """Parse ports separated by commas. Raises `ConfigurationError` naming the variable."""
    ports = [part.strip() for part in text.split(",")]
    wrong = [part for part in ports if not (part.isascii() and part.isdigit() and 1 <= int(part[:6]) <= 65_535)]
    if wrong:
        raise ConfigurationError(f"{variable}={text!r}: {wrong[0]!r} is not a port from 1 to 65535")
    return frozenset(map(int, ports))


def parse_networks(variable: str, text: str) -> tuple[Network, ...]:
    """Parse networks in CIDR notation, separated by commas. Raises `ConfigurationError` naming the variable."""
    try:
        return tuple(ip_network(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"{variable}={text!r}: {error}; for example fd00::/8") from None
