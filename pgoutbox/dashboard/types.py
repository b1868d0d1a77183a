"""Types and scope keys that the modules of the dashboard share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

import psycopg
from psycopg.rows import TupleRow

from pgoutbox.dashboard.credentials import Role

ROOT: Final = "pgoutbox.root"
VIEWER: Final = "pgoutbox.viewer"

Connection: TypeAlias = psycopg.Connection[TupleRow]


@dataclass(frozen=True, slots=True)
class Viewer:
    """The authenticated viewer: `request.scope["pgoutbox.viewer"]` on every page after sign-in.

    The table `audit` records `origin`. Forms that POST contain `csrf_token`.
    """

    name: str
    role: Role
    csrf_token: str = field(default="", repr=False)
    origin: str = ""
    can_sign_out: bool = False
