"""Export: a checkpoint becomes a folder that other programs load, with a model card."""
