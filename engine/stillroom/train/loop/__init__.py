"""What every training method shares: steps, checkpoints, evaluations and metrics."""
