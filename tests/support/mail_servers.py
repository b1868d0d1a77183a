"""Debian's Postfix and Exim, each with a private configuration, queue and port. Nothing of the system is touched.

Both deliver every accepted e-mail to nowhere. Postfix has a port for each set of restrictions. Exim refuses while a
file exists.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.dialogues import HOST
from tests.support.missing import server_missing
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOCAL_DOMAIN: Final = "mx.test"
LOCAL_USER: Final = "ada"

# Debian's own settings, as far as they concern refusals, and a private place.
_MAIN_CF: Final = """
compatibility_level = 3.6
queue_directory = {place}/spool
data_directory = {place}/data
maillog_file = {place}/log
maillog_file_prefixes = {place}
command_directory = /usr/sbin
daemon_directory = /usr/lib/postfix/sbin
myhostname = {domain}
mydestination = {domain}
local_recipient_maps = inline:{{ {user}=1 }}
alias_maps =
alias_database =
local_transport = discard
default_transport = discard
inet_interfaces = 127.0.0.1
inet_protocols = ipv4
mynetworks = 127.0.0.0/8
smtpd_relay_restrictions = permit_mynetworks permit_sasl_authenticated defer_unauth_destination
smtpd_peername_lookup = no
smtpd_error_sleep_time = 0
"""
_MASTER_CF: Final = """
postlog unix-dgram n - n - 1 postlogd
pickup unix n - n 60 1 pickup
cleanup unix n - n - 0 cleanup
qmgr unix n - n 300 1 qmgr
rewrite unix - - n - - trivial-rewrite
bounce unix - - n - 0 bounce
defer unix - - n - 0 bounce
trace unix - - n - 0 bounce
verify unix - - n - 1 verify
proxymap unix - - n - - proxymap
error unix - - n - - error
retry unix - - n - - error
discard unix - - n - - discard
anvil unix - - n - 1 anvil
tlsmgr unix - - n 1000? 1 tlsmgr
"""
_EXIM: Final = """
exim_path = {program}
primary_hostname = {domain}
spool_directory = {place}/spool
log_file_path = {place}/log-%s
exim_user = Debian-exim
exim_group = Debian-exim
acl_smtp_helo = check_helo
acl_smtp_rcpt = check_rcpt
acl_smtp_data = check_data
message_size_limit = ${{if exists{{{place}/size}}{{100}}{{50M}}}}
host_lookup =
begin acl
check_helo:
  deny condition = ${{if exists{{{place}/helo}}}}
  accept
check_rcpt:
  deny condition = ${{if exists{{{place}/relay}}}}
       message = relay not permitted
  deny condition = ${{if exists{{{place}/sender}}}}
       message = Sender verify failed
  deny condition = ${{if exists{{{place}/rate}}}}
       ratelimit = 3 / 1h / per_rcpt / strict / $sender_address_domain
       message = Domain $sender_address_domain has exceeded the max emails per hour (60/60 (100%)) allowed
  deny condition = ${{if exists{{{place}/silent}}}}
  defer condition = ${{if exists{{{place}/greylist}}}}
       message = greylisted, please try again later
  deny domains = {domain}
       ! local_parts = {user}
       message = Unknown user
  accept
check_data:
  accept
begin routers
all:
  driver = accept
  transport = nowhere
begin transports
nowhere:
  driver = appendfile
  file = /dev/null
  user = Debian-exim
"""


@dataclass(frozen=True, slots=True)
class Postfix:
    """A running Postfix."""

    place: Path
    ports: Mapping[str, int]

    def repair(self, service: str) -> None:
        """Remove the restrictions of a service, and let Postfix read its configuration again, as an operator does."""
        name = f"{HOST}:{self.ports[service]}/inet"
        listed = _run("postconf", "-c", str(self.place / "etc"), "-P", f"{name}/*").splitlines()
        for line in listed:
            _run("postconf", "-c", str(self.place / "etc"), "-PX", line.partition(" =")[0])
        _run("postfix", "-c", str(self.place / "etc"), "reload")


@contextlib.contextmanager
def running_postfix(services: Mapping[str, Mapping[str, str]]) -> Iterator[Postfix]:
    """Run Postfix with a port for each of these services, which have these settings of their own."""
    if os.getuid() != 0 or shutil.which("postfix", path=_PATH) is None:
        server_missing("no postfix, or not root")
    with tempfile.TemporaryDirectory(prefix="pgoutbox-postfix-") as name:
        place = Path(name)
        place.chmod(0o755)
        for part in ("etc", "spool", "data"):
            (place / part).mkdir()
        shutil.chown(place / "data", "postfix")
        ports = dict(zip(services, free_ports(len(services)), strict=True))
        lines = [_MASTER_CF]
        for service, settings in services.items():
            lines.append(f"{HOST}:{ports[service]} inet n - n - - smtpd")
            lines += [f"  -o {{ {setting} = {value} }}" for setting, value in settings.items()]
        (place / "etc/master.cf").write_text("\n".join(lines) + "\n")
        (place / "etc/main.cf").write_text(_MAIN_CF.format(place=place, domain=LOCAL_DOMAIN, user=LOCAL_USER))
        _run("postfix", "-c", str(place / "etc"), "start")
        try:
            wait_until(lambda: all(_answers(port) for port in ports.values()), (place / "log").read_text)
            yield Postfix(place, ports)
        finally:
            _run("postfix", "-c", str(place / "etc"), "stop")


@dataclass(frozen=True, slots=True)
class Exim:
    """A running Exim. It refuses by `relay`, `sender`, `helo`, `rate`, `silent`, `size` or `greylist`."""

    place: Path
    port: int

    @contextlib.contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Refuse for this reason until the context ends."""
        (self.place / reason).touch()
        try:
            yield
        finally:
            (self.place / reason).unlink()


@contextlib.contextmanager
def running_exim() -> Iterator[Exim]:
    """Run Exim."""
    program = shutil.which("exim4", path=_PATH)
    if os.getuid() != 0 or program is None:
        server_missing("no exim4, or not root")
    with tempfile.TemporaryDirectory(prefix="pgoutbox-exim-") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "spool").mkdir()
        shutil.chown(place, "Debian-exim")
        shutil.chown(place / "spool", "Debian-exim")
        (place / "conf").write_text(_EXIM.format(place=place, program=program, domain=LOCAL_DOMAIN, user=LOCAL_USER))
        (port,) = free_ports(1)
        command = [program, "-C", str(place / "conf"), "-bdf", "-oX", f"{HOST}.{port}", "-oP", str(place / "pid")]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as daemon:
            try:
                wait_until(lambda: _answers(port) or daemon.poll() is not None, lambda: "exim does not answer")
                assert daemon.poll() is None
                yield Exim(place, port)
            finally:
                daemon.terminate()


_PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


def _run(program: str, *arguments: str) -> str:
    command = [str(shutil.which(program, path=_PATH)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=5) as connection:
        return connection.recv(3) in (b"220", b"554")
    return False
