"""On-policy distillation: the student answers and the teacher scores each token."""
