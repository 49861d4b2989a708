"""Answers that are kept for a moment, for clients that ask for the same again."""
