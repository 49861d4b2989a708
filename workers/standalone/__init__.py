"""Training without the service."""
