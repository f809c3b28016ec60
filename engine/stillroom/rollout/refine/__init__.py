"""Teachers that take over in a student's failed rollouts."""
