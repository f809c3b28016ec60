"""Reads rows for curation: their untouched bytes, and the facts by which filters judge them."""
