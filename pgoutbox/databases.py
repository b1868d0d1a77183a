"""Stub."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings


def read_databases(settings: Settings, outbox: Outbox | None) -> dict[str, str] | None:
    if settings.dsns is None or settings.dsn is not None:
        return None
    text = settings.dsns.get_secret_value()
    if text.startswith("/"):
        text = Path(text).read_text()
    return dict(line.split(None, 1) for line in text.splitlines() if line.strip())


def settings_of(settings: Settings, name: str, dsn: str) -> Settings:
    return settings.model_copy(update={"dsn": SecretStr(dsn), "dsns": None, "database": name})
