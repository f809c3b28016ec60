"""The recipe: one run that takes prompts and a teacher to a measured student."""
