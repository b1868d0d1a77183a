"""The statements of the kernel, one in a file of `sql`, read without their comments."""

from __future__ import annotations

from importlib.resources import files
from typing import Final, LiteralString


def _read(name: str) -> LiteralString:
    text = (files(__package__) / "sql" / f"{name}.sql").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--")]
    return "\n".join(lines)


CLAIM: Final = _read("claim")
END_CLAIMS: Final = _read("end_claims")
FINISH: Final = _read("finish")
FINISH_SENT: Final = _read("finish_sent")
FORGET_LAPSED: Final = _read("forget_lapsed")
LAPSED: Final = _read("lapsed")
NEXT_DUE: Final = _read("next_due")
OVERTAKEN: Final = _read("overtaken")
STATES: Final = _read("states")
