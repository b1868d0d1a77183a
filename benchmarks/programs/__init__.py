"""The programs that run in separate processes. Each imports only the system that it measures."""
