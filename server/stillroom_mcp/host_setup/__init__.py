"""`stillroom setup HOST`: enters the server in the configuration of an agent host."""
