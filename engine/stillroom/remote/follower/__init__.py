"""The local process that follows a run on another machine and keeps its folder up to date."""
