"""`stillroom setup HOST`: adds the server to the config of an agent host."""
