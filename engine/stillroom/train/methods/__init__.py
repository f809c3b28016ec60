"""Training methods on fixed rows: supervised fine-tuning and DPO, with their losses."""
