"""The dashboard: read-only pages about a workspace's runs and data, served on this machine."""
