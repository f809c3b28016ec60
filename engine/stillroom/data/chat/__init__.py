"""Conversations as tokens: chat templates, rendering, and the training mask."""
