"""Decides what is sent to another machine for a run: files, packages and secrets."""
