"""Joins logged calls, each of which repeats the history before it, into conversations."""
