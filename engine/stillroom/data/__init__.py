"""The rows of prompts, rollouts and training files, and how their conversations become tokens."""
