"""Circuit breakers: they hold back the messages of a transport, a host or a sender that fails."""
