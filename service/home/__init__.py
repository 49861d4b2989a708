"""The folder of a service, and that of its jobs."""
