"""Curation on a Ray cluster, with the same rows and counts as in one process."""
