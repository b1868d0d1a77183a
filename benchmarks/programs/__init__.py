"""The programs that run in processes of their own. Each imports only what it measures."""
