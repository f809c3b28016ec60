"""Tools that run in a container for each task."""
