"""The parts that all training methods share: steps, checkpoints, evaluations and metrics."""
