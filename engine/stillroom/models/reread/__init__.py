"""Compares a student with a teacher that has another tokenizer or chat template, byte by byte."""
