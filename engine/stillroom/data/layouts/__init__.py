"""The rollout layouts of other systems, and their conversions into our layout and back."""
