"""Supervised training on a teacher's probabilities, scored live or stored."""
