"""The append-only record that lets a killed run go on, and its shards."""
