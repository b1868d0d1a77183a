"""Wheels of the package, as a release builds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

UV: Final = str(Path(sys.executable).with_name("uv"))


def build(source: Path, directory: Path) -> Path:
    """Build the source archive of this checkout into `directory`, and from it the wheel, which is returned."""
    command = [sys.executable, "-m", "build", "--installer", "uv", "--outdir", str(directory), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def install_alone(wheel: Path, directory: Path) -> None:
    """Install a wheel into a folder for Python's path. The packages that it needs are those of this interpreter."""
    command = [UV, "--quiet", "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(directory)]
    subprocess.run([*command, str(wheel)], check=True)
