"""The forecast of a training run: the memory, disk and time that it will need."""
