"""config.yml: what it may say, how it is read, and what a run that is resumed must still say."""
