"""How the embedded world's tokenizer, student and teacher are made; not needed to use them."""
