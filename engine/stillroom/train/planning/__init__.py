"""What a training run will need, found out before it is started."""
