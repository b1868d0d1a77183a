"""Measure the cost of a message of each kind, and print what exceeds the budget. `--write` writes the book instead.

Arguments choose kinds. Run it on a quiet machine before you write.
"""

from __future__ import annotations

import json
import sys

from tests.budget.book import BOOK, exceeded, least, read_book, rounded_up
from tests.budget.meter import KINDS, measure, running_meter

_ROUNDS = 3


def main(arguments: list[str]) -> int:
    """Return 1 if a count exceeds the budget."""
    writes = "--write" in arguments
    chosen = [name for name in arguments if name != "--write"] or list(KINDS)
    book = read_book() if BOOK.exists() else {}
    code = 0
    with running_meter() as meter:
        for name in chosen:
            kind = KINDS[name]
            costs = measure(meter, kind)
            if writes:
                for _ in range(_ROUNDS - 1):
                    costs = least(costs, measure(meter, kind))
                pairs = zip(kind.sizes, costs, strict=True)
                book[name] = {str(size): {of: rounded_up(cost[of]) for of in sorted(cost)} for size, cost in pairs}
                lines = [f"{size} messages: {cost}" for size, cost in book[name].items()]
            else:
                lines = exceeded(kind, costs, book[name])
                code |= bool(lines)
            sys.stdout.write("\n  ".join([name, *(lines or ["within the budget"])]) + "\n")
            sys.stdout.flush()
    if writes:
        BOOK.write_text(json.dumps({name: book[name] for name in KINDS if name in book}, indent=2) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
