"""The process that serves: its sockets, its files in the home."""
