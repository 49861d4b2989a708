"""Names and spelling of metrics."""
