"""Applications of other projects, which only their users import."""
