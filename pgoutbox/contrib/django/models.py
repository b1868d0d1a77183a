"""No models. Django sends the signal after `migrate` only to applications with this module."""
