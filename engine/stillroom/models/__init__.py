"""Models as files and as tensors: names to folders, loading, batches of tokens, the output head."""
