"""config.yml: its schema, how it is read and checked, and what must not change on resume."""
