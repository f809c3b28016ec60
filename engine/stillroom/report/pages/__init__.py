"""Pages about one data file: its rows, its distributions, a review."""
