"""The server over HTTP: who may call it, the token that callers show, and the listening socket."""
