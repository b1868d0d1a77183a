"""The statements of the kernel, one in a file of `sql`, read without their comments."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final, LiteralString


def _read(name: str, *leaves_out: str) -> LiteralString:
    """Return a statement, without the parts between lines `-- [name` and `-- name]` that it leaves out."""
    text = (files(__package__) / "sql" / f"{name}.sql").read_text(encoding="utf-8")
    for part in leaves_out:
        text = re.sub(rf"^ *-- \[{part}\n.*?^ *-- {part}\]\n", "", text, flags=re.MULTILINE | re.DOTALL)
    # Without indentation, which is a third of their bytes: each connection sends them.
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("--")]
    return "\n".join(lines)


CLAIM: Final = _read("claim", "probe")
CLAIM_PROBE: Final = _read("claim", "lanes")
CLAIM_WITHOUT_KEYS: Final = _read("claim", "probe", "ordering keys")

END_ATTEMPTS: Final = _read("end_attempts")
END_CLAIMS: Final = _read("end_claims")
FINISH: Final = _read("finish", "holds")
FINISH_AND_HOLD: Final = _read("finish", "no holds")
FINISH_SENT: Final = _read("finish_sent")
FORGET_SENT: Final = _read("forget_sent")
FORGET_LAPSED: Final = _read("forget_lapsed")
HEARTBEAT: Final = _read("heartbeat")
HOLD: Final = _read("hold")
HUSH: Final = _read("hush")
LAPSED: Final = _read("lapsed")
LET_GO: Final = _read("let_go")
NEXT_DUE: Final = _read("next_due")
OVERTAKEN: Final = _read("overtaken")
STATES: Final = _read("states")
TELL_SUCCESSORS: Final = _read("tell_successors")
TELL_WORKERS: Final = _read("tell_workers")
