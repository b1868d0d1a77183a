"""Flask and Flask-SQLAlchemy. The worker is a process of its own.

flask --app flask_app run
curl --json '{"email": "ada@example.org"}' http://127.0.0.1:5000/members
pgoutbox worker --app flask_app:outbox
"""

import os

from flask import Blueprint, Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgoutbox import Email, Message, Outbox, SyncContext

outbox = Outbox()


class Base(DeclarativeBase):
    """The tables of the application."""


class Member(Base):
    """A member of the club."""

    __tablename__ = "member"
    email: Mapped[str] = mapped_column(primary_key=True)


db = SQLAlchemy(model_class=Base)
members = Blueprint("members", __name__)


@outbox.handler("mail.welcome")
def welcome(message: Message, ctx: SyncContext) -> Email:
    """Render the e-mail to the message's destination."""
    ctx.ensure_lease()
    return Email(subject="Welcome", text=f"Good to have you in the club. (This is e-mail {message.id}.)")


@members.post("/members")
def join() -> tuple[str, int]:
    """Add a member and enqueue the welcome, in one transaction."""
    email = request.get_json()["email"]
    db.session.add(Member(email=email))
    outbox.on(db.session).enqueue("mail.welcome", None, destination=f"mailto:{email}")
    db.session.commit()
    return "", 201


def create_app() -> Flask:
    """Create the application on the database of the environment."""
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
    app.register_blueprint(members)
    db.init_app(app)
    with app.app_context():
        Base.metadata.create_all(db.engine)
    return app
