"""Samples from a model in this process, with many conversations batched token by token."""
