"""The statements of the kernel, one in a file of `sql`, read without their comments."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final, LiteralString


def _read(name: str, *, leaves_out: str | None = None) -> LiteralString:
    """Return a statement, without the part between the lines `-- [name` and `-- name]` that it leaves out."""
    text = (files(__package__) / "sql" / f"{name}.sql").read_text(encoding="utf-8")
    if leaves_out is not None:
        text = re.sub(rf"^ *-- \[{leaves_out}\n.*?^ *-- {leaves_out}\]\n", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--")]
    return "\n".join(lines)


CLAIM: Final = _read("claim")
CLAIM_WITHOUT_KEYS: Final = _read("claim", leaves_out="ordering keys")

END_ATTEMPTS: Final = _read("end_attempts")
END_CLAIMS: Final = _read("end_claims")
FINISH: Final = _read("finish")
FINISH_SENT: Final = _read("finish_sent")
FORGET_LAPSED: Final = _read("forget_lapsed")
LAPSED: Final = _read("lapsed")
NEXT_DUE: Final = _read("next_due")
OVERTAKEN: Final = _read("overtaken")
STATES: Final = _read("states")
TELL_SUCCESSORS: Final = _read("tell_successors")
