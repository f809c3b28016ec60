"""Where something comes from: back along the manifests, checked against what is there now."""
