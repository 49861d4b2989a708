"""Answers that go on: streams of events, and requests that wait."""
