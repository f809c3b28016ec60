"""Scripts that make the samples of `tests/fixtures/traces`, and what they share."""
