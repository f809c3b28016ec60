"""What a training recipe knows of its data: the forms of prompts, and labels that may be wrong."""
