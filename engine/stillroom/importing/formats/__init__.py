"""The formats that import_rollouts reads; each reader turns a source's rows into conversations."""
