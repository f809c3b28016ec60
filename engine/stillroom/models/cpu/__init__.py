"""Hand-written gradients for models on the CPU; other packages import `gradients` only."""
