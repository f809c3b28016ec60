"""Keeps secrets from leaking through files, environments, hosts and texts."""
