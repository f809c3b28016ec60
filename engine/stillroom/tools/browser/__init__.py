"""The built-in tool `browse`: web pages as text, in one Chromium for all rollouts."""
