"""Imports rollouts from traces, agent sessions, API logs and datasets."""
