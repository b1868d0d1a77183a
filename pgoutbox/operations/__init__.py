"""The work of operators: messages, queues, retention, and the audit of both."""
