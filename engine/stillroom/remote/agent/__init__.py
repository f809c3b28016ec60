"""The program that runs on another machine: each of its commands does one thing for a run."""
