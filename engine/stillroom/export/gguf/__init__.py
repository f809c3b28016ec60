"""GGUF files: written here for the common model families, else by llama.cpp's converter."""
