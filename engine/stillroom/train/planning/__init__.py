"""What a training run will need, forecast before it is started."""
