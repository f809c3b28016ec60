"""Machines that are provisioned and released: SkyPilot's clusters and the jobs of Hugging Face."""
