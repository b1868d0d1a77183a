"""The protocol as small models, which the tests explore in every interleaving: the promises hold, and each guard is
needed."""
