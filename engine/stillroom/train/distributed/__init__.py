"""Training in several processes (ranks), on one machine or several."""
