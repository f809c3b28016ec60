"""Gradients formed by hand, which make training without a GPU faster."""
