"""E-mail: contents, templates, and delivery by SMTP or by the program of a local mail server."""

from pgoutbox.transports.smtp.log import LogTransport
from pgoutbox.transports.smtp.mail import Attachment, Email, RawEmail
from pgoutbox.transports.smtp.sendmail import SendmailTransport
from pgoutbox.transports.smtp.transport import SmtpTransport

__all__ = ["Attachment", "Email", "LogTransport", "RawEmail", "SendmailTransport", "SmtpTransport"]
