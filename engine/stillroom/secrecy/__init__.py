"""Keeps secrets where they belong: files, environments, hosts and texts that may hold them."""
