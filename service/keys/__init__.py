"""Keys, and the secrets that prove who somebody is."""
