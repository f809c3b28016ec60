"""config.yml: its schema, how it is read and checked, and which keys a resumed run must keep."""
