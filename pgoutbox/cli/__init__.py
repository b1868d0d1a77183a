"""The command line. It needs the extra `cli`."""
