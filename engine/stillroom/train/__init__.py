"""Training: supervised, on preferences, and on-policy with a teacher that scores every token."""
