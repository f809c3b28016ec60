"""Rows: what prompts, rollouts and training files hold, and how a conversation becomes tokens."""
