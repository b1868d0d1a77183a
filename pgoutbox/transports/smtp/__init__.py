"""E-mail: contents, templates, and delivery by SMTP or by the program of a local mail server."""
