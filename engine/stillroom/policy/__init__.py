"""Sampling from a model in this process, which many conversations share token by token."""
