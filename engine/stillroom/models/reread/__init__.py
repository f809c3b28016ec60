"""A teacher with a tokenizer and a template of its own reads the student's text again, by bytes."""
