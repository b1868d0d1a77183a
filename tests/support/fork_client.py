"""Runs a command in a process of tests/support/forks.py: `python -IS fork_client.py SOCKET -m pgoutbox list`.

Shell scripts use it. It imports little, so that it starts in a few milliseconds. It passes on its directory, variables
and standard streams, and ends with the exit code of the command, but passes on no signal.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(sys.argv[1])
    request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)])  # noqa: PTH109 - pathlib imports much
    socket.send_fds(server, [request.encode()], [0, 1, 2])
    server.recv(8)  # Its process.
    sys.exit(int(server.recv(8)) % 256)
