"""The kernel: from a committed row to its next state.

A worker claims messages, runs their attempts and writes the outcomes; every write is fenced in its statement. The
kernel imports the driver and the standard library, and no other module of this package: what else a worker can do comes
in by the seams of `kernel.seams`.
"""
