"""Which of several control planes owns what."""
