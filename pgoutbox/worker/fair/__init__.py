"""Fair shares: keys take turns in their queue."""
