"""The student: its weights, token sequences and optimiser, and the processes that train it."""
