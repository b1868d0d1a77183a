"""Make the frozen dump of a version's schema, with messages in all states: `make dump`.

Each later revision has to bring it forward. Once the version is in the changelog, its dump never changes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pgoutbox.embedded import embedded_server
from tests.frozen.dump import FILE, VERSION, is_released, make


def main() -> None:
    """Run the command line."""
    if is_released():
        sys.exit(f"{VERSION} is released: its dump does not change. A later version gets a file of its own")
    with tempfile.TemporaryDirectory(prefix="pgoutbox-frozen-") as name:
        Path(name).chmod(0o711)  # PostgreSQL's account must be able to enter.
        with embedded_server(Path(name) / "data", durable=False) as server:
            make(server.dsn)
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")  # noqa: T201


if __name__ == "__main__":
    main()
