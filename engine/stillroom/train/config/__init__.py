"""config.yml: its schema, reading and checking it, and which keys a resumed run must keep."""
