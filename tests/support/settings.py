"""Settings from flat names, such as `smtp_host`: the environment variables in lower case, without the prefix."""

from __future__ import annotations

from pgoutbox.settings import Settings, fields_of, load_settings

_PATHS = {path.replace(".", "_"): path for path in fields_of(Settings)}


def settings_with(**values: object) -> Settings:
    """Read the environment. `values`, by flat name, take precedence; None means "not given"."""
    given: dict[str, object] = {}
    groups: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        group, _, field = _PATHS[name].rpartition(".")
        if value is not None:
            (groups.setdefault(group, {}) if group else given)[field] = value
    return load_settings(**given, **groups)
