"""Programs for contributors; none of them is part of the package."""
