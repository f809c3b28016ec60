"""Hand-written gradients for models on the CPU; import this package through `gradients`."""
