"""Converts the bodies of model calls, of all chat APIs, to messages in Stillroom's format."""
