"""The start of the server: it answers its host before it has loaded the engine."""
