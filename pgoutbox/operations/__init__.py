"""Operations: manual changes of messages and queues, retention, and the audit of both."""
