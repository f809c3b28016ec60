"""Traces the origin of a file or model through manifests, and checks the files on disk."""
