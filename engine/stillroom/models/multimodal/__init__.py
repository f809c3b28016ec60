"""Multimodal models, of which only the text part is run and trained."""
