"""What is wrong with an installation, why it matters, and how to mend it.

Each check asks one thing, for a bounded time, and yields findings; one that fails is a finding too. Nothing is changed:
no message is written or sent, and no mail. What is said is not masked: it can quote what the settings quote.
"""

from __future__ import annotations

from pgoutbox.doctor.context import Limits
from pgoutbox.doctor.findings import Finding, Level
from pgoutbox.doctor.runner import examine

__all__ = ["Finding", "Level", "Limits", "examine"]
