"""The pytest plugin for applications that use pgoutbox: the test triggers each delivery, and nothing is sent.

    def test_sign_up_sends_the_activation_mail(pgoutbox_driver, connection):
        driver = pgoutbox_driver(myapp.outbox)
        myapp.sign_up(connection, "ada@example.org")
        connection.commit()
        driver.assert_enqueued("mail.activation", payload={"email": "ada@example.org"})
        driver.run_pass()
        assert driver.deliveries[0].content.subject == "Welcome"

A message that ends `failed` fails the test, and so does a handler that raises an exception, unless the test expects it.
The statements, claims and fences are the real
ones, on a real database. `pgoutbox_dsn` creates one on the embedded server; an application with its own test database
overrides that fixture, and one with its own Alembic history overrides `pgoutbox_migrate`.
"""

from pgoutbox.testing.driver import Delivery, OutboxDriver, Row, sqlalchemy_url

__all__ = ["Delivery", "OutboxDriver", "Row", "sqlalchemy_url"]

pytest_plugins: tuple[str, ...] = ("pgoutbox.testing.fixtures",)
"""pytest loads this module by its entry point, and then the fixtures. Other test runners need no pytest."""
