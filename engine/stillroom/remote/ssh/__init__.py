"""A machine that the system's own ssh reaches: the connection, what is put there, its errors."""
