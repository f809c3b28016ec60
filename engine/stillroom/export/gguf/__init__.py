"""Writes GGUF files: of common model families directly, of others by llama.cpp's converter."""
