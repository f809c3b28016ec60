"""What is sampled now: an in-process model that many conversations share, token by token."""
