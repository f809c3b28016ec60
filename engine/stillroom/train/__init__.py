"""Training: supervised, on preferences, and on-policy distillation with a scoring teacher."""
