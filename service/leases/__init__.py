"""Who of several control planes looks after what."""
