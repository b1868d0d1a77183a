"""E-mail: contents, templates, and delivery by SMTP."""

from pgoutbox.transports.smtp.log import LogTransport
from pgoutbox.transports.smtp.mail import Attachment, Email, RawEmail
from pgoutbox.transports.smtp.transport import SmtpTransport

__all__ = ["Attachment", "Email", "LogTransport", "RawEmail", "SmtpTransport"]
