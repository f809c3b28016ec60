"""Joins the rows of sources to conversations: logs repeat their history with every call."""
