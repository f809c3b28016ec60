"""A user's project folder: prompts, tools, rewards and configurations, ready to run."""
