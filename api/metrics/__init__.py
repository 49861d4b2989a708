"""The service's numbers for Prometheus: read at scrape time, so that they cannot go stale."""
