"""Models as files and as tensors: finding and loading them, token batches, the output head."""
