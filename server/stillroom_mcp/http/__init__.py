"""The HTTP server: which requests are allowed, the token, and the listening socket."""
