"""The command `pgoutbox`."""
