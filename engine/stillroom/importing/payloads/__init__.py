"""The bodies of model calls: requests and replies of all chat APIs, read into our messages."""
