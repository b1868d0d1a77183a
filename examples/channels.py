"""The messages of an emergency centre: one handler writes e-mails and text messages, and an outage loses none.

    export SMS_GATEWAY_URL=http://127.0.0.1:8026/ SMS_GATEWAY_KEY=secret
    export PGOUTBOX_ALERT_DESTINATION=mailto:admin@club.test
    python -m examples.channels
    pgoutbox worker --app examples.channels:outbox --queue urgent --queue routine --concurrency 4

    pgoutbox stats                            # No gateway listens: its breaker is open, and the admin got an e-mail.
    python -m examples.channels gateway 8026  # Repair it. The worker sends all texts after its next probe.
    pgoutbox breaker close sms:127.0.0.1      # Send them now.

    pgoutbox list --state failed              # The gateway refuses two numbers.
    pgoutbox correct 24 49 --set destination=sms:+491701234599
    pgoutbox dismiss --destination sms:+9990000002 --reason "moved away"

The scheme of a destination selects the channel. While the gateway is down, text messages wait without using up
attempts, and e-mail goes on. An address that fails for good is marked, and gets no more messages.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

import psycopg
from pydantic import BaseModel

from examples.sms import Sms, SmsTransport
from pgoutbox import Context, Email, Failure, Message, Outbox, RetryPolicy, Topic


class Notice(BaseModel):
    """A text for everybody. Text messages have no subject."""

    subject: str
    text: str


# An alarm is tried again at least every minute. The pauses of a routine notice double, up to an hour.
URGENT: Topic[Notice] = Topic(
    "notice.urgent", payload=Notice, queue="urgent", retry=RetryPolicy.steps(2, 5, 15, 60, max_attempts=60)
)
ROUTINE: Topic[Notice] = Topic(
    "notice.routine", payload=Notice, queue="routine", retry=RetryPolicy(base=10, cap=3600, max_attempts=12)
)

TABLES = "CREATE TABLE IF NOT EXISTS contact (address text PRIMARY KEY, problem text)"
E_MAILS = ["mailto:ada@example.org", "mailto:bob@example.org", "mailto:cid@example.org"]
WRONG_NUMBERS = ["sms:+9990000001", "sms:+9990000002"]  # No country has this code.
NUMBERS = [f"sms:+4917012345{n}" for n in range(10, 30)]

outbox = Outbox(transports=[SmsTransport(os.environ.get("SMS_GATEWAY_URL", ""), os.environ.get("SMS_GATEWAY_KEY", ""))])


@outbox.handler(URGENT)
@outbox.handler(ROUTINE)
async def write(message: Message[Notice], ctx: Context) -> Email | Sms:
    """Write the notice for the channel of its destination."""
    notice = message.payload
    await ctx.ensure_lease()
    if (message.destination or "").startswith("mailto:"):
        return Email(subject=notice.subject, text=notice.text)
    return Sms(notice.text)


@outbox.on_failed(URGENT, transactional=True)
@outbox.on_failed(ROUTINE, transactional=True)
async def mark_address(message: Message[Failure], ctx: Context) -> None:
    """Mark an address that failed for good."""
    failure = message.payload
    await ctx.connection.execute(
        "UPDATE contact SET problem = %s WHERE address = %s", (failure.error, failure.destination)
    )


def tell_everybody(connection: psycopg.Connection, topic: Topic[Notice], notice: Notice) -> Counter[str]:
    """Enqueue the notice for each address without a problem. Return the number of messages for each scheme."""
    found = connection.execute("SELECT address FROM contact WHERE problem IS NULL ORDER BY address")
    addresses = [address for (address,) in found]
    outbox.on(connection).enqueue_fanout(topic, notice, addresses)
    return Counter(address.partition(":")[0] for address in addresses)


def main() -> None:
    """Enqueue an alarm and a routine notice for everybody."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute(TABLES)
        contacts = [(address,) for address in (*E_MAILS, *NUMBERS, *WRONG_NUMBERS)]
        connection.cursor().executemany("INSERT INTO contact (address) VALUES (%s) ON CONFLICT DO NOTHING", contacts)
        alarm = Notice(subject="Flood warning", text="Leave the river bank now.")
        drill = Notice(subject="Drill", text="The next drill is on Saturday at 10:00.")
        for topic, notice in ((ROUTINE, drill), (URGENT, alarm)):
            print(topic.name, *(f"{n} {scheme}" for scheme, n in tell_everybody(connection, topic, notice).items()))


class Gateway(BaseHTTPRequestHandler):
    """A gateway to play with: it prints each text, and refuses the numbers of an unknown country."""

    def do_POST(self) -> None:
        """Accept or refuse one text message."""
        sms = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_wrong = sms["to"].startswith("+999")
        print("refused" if is_wrong else "sent", sms["to"], sms["text"], flush=True)
        self.send_response_only(422 if is_wrong else 202)
        self.send_header("Content-Length", "0")
        self.end_headers()


if __name__ == "__main__":
    if sys.argv[1:2] == ["gateway"]:
        HTTPServer(("127.0.0.1", int(sys.argv[2])), Gateway).serve_forever()
    main()
