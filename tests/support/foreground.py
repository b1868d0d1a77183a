"""Commands that receive Ctrl-C, however the tests were started.

A shell starts a background job with SIGINT ignored, and children inherit that. A program correctly keeps ignoring
it. A test that interrupts a program therefore starts it as a foreground job.
"""

from __future__ import annotations

import sys
from typing import Final

_HEAR_CTRL_C: Final = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def in_foreground(*arguments: str) -> list[str]:
    """Return a command that runs this interpreter with these arguments, and with SIGINT handled as in a foreground
    job."""
    return [sys.executable, "-c", _HEAR_CTRL_C, sys.executable, *arguments]
