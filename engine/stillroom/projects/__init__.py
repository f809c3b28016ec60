"""Project folders with prompts, tools, rewards and configs, and checks of the setup."""
