"""Parts of other frameworks, which only their users import."""
