"""Traces for OpenTelemetry: what the database says about the starts and recoveries of a job, as spans."""
