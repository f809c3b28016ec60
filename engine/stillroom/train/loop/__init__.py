"""What all training methods share: steps, checkpoints, evaluations and metrics."""
