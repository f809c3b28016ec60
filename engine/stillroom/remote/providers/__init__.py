"""Machines that we bring up and put down: SkyPilot's clusters and the jobs of Hugging Face."""
