"""Check an installation for faults; each finding has its effect and a fix.

Each check has a time limit and yields findings; a check that fails is a finding too. The doctor changes nothing and
sends nothing. Findings can quote values of the settings: mask secrets before you print them.
"""

from __future__ import annotations

from pgoutbox.doctor.context import Limits
from pgoutbox.doctor.findings import Finding, Level, verdict
from pgoutbox.doctor.runner import examine, examine_delivery

__all__ = ["Finding", "Level", "Limits", "examine", "examine_delivery", "verdict"]
