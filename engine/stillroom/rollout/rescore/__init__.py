"""New rewards for finished rollouts; no turn is sampled again."""
