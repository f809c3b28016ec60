"""The rollout layouts of other systems, and their conversion to Stillroom's layout."""
