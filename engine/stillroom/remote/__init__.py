"""Runs on other machines: sent, started there, mirrored here, brought back and paid for."""
