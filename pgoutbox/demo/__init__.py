"""`pgoutbox demo`: a sign-up service with a killed worker, and a ledger that must balance.

`service` is the application: topics, handlers and the business transactions. `mailbox` is the receiving SMTP server.
`play` starts servers and workers, plays the scenario and kills a worker during it. `ledger` compares the committed
messages with the received e-mails and with the table.
"""

from pgoutbox.demo.play import run_demo

__all__ = ["run_demo"]
