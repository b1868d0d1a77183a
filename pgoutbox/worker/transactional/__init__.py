"""Transactional handlers: the effect of a handler and the end of its attempt commit together."""
