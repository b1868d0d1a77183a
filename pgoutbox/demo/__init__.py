"""`pgoutbox demo`: a sign-up service under fire, and a ledger that has to add up.

`service` is the application: topics, handlers and the business transactions. `mailbox` is the SMTP server at the
other end. `play` starts servers and workers, plays the scenario and kills a worker in the middle of it. `ledger`
compares what was committed with what was received and with what the table says.
"""

from pgoutbox.demo.play import run_demo

__all__ = ["run_demo"]
