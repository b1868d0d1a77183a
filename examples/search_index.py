"""Bulk enqueue and a batch handler: many documents in one statement, and one call for many messages.

    python -m examples.search_index
    pgoutbox worker --app examples.search_index:outbox --once

The search index is a file here. The handler returns an outcome for each message, so a refused document does not affect
the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from pgoutbox import Message, NewMessage, Outbox, Permanent, Sent, Skip, SyncContext

Outcome = Sent | Permanent | Skip

INDEX = Path(os.environ.get("SEARCH_INDEX", "search_index.jsonl"))

outbox = Outbox()


@outbox.batch_handler("search.document", max_size=50)
def index_documents(messages: Sequence[Message[dict[str, Any]]], contexts: Sequence[SyncContext]) -> list[Outcome]:
    """Append the documents of the batch in one write. Idempotent, because the last line of a document counts."""
    lines: list[str] = []
    outcomes: list[Outcome] = []
    for message, ctx in zip(messages, contexts, strict=True):
        document = message.payload
        if ctx.should_stop:
            outcomes.append(Skip("a newer version of the document is on its way"))
        elif document.get("text"):
            lines.append(json.dumps(document) + "\n")
            outcomes.append(Sent())
        else:
            outcomes.append(Permanent("the document has no text"))
    with INDEX.open("a") as index:
        index.write("".join(lines))
    return outcomes


def enqueue_documents(connection: psycopg.Connection, texts: Sequence[str]) -> int:
    """Enqueue a message for each text, in the caller's transaction. Return the number of new messages."""
    enqueued = outbox.on(connection).enqueue_many(
        [
            NewMessage("search.document", {"id": number, "text": text}, coalesce_key=str(number))
            for number, text in enumerate(texts, start=1)
        ],
    )
    return sum(not answer.duplicate for answer in enqueued)


def main() -> None:
    """Enqueue a hundred documents, one of them without a text."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        texts = [f"document {number}" for number in range(1, 100)]
        print("enqueued", enqueue_documents(connection, [*texts, ""]))


if __name__ == "__main__":
    main()
