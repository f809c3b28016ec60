"""Traces where a file or model comes from, along manifests that are checked against the disk."""
