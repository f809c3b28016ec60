"""What run_recipe decides: which prompts to hold out, which answers to doubt, how to train."""
