"""Gradients formed by hand for models in main memory; use this package through `gradients`."""
