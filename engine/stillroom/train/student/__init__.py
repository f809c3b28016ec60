"""The student: its weights, its token sequences, its optimiser, and the processes that share it."""
