"""Lets the files of an export answer evaluated prompts before the export counts as done."""
