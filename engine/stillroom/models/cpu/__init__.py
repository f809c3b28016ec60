"""Gradients formed by hand, for models in main memory; all of it is used through `gradients`."""
