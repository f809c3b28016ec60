"""What every training method shares: steps, checkpoints, evaluations, metrics and alarms."""
