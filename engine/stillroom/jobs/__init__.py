"""Runs: a folder each, a detached process each; they outlive whoever started them."""
