"""The protocol as small models, explored in every interleaving: the promises hold, and break without their guards."""
