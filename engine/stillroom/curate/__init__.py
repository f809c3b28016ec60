"""Curation: rollouts become training rows; every row that is left out has its reason."""
