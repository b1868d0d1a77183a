"""Events, and their delivery to message brokers. Each broker needs the extra of its name."""
