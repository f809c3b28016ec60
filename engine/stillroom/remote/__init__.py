"""Runs on other machines: sent, started, mirrored here, downloaded and paid for."""
