"""Runs: each has a folder and a detached process, which outlives the program that started it."""
