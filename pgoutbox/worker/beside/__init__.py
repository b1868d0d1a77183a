"""What a worker does beside deliveries: maintenance, its presence, and alerts about failures."""
