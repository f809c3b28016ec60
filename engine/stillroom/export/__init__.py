"""From a checkpoint to a folder that others load and serve, with a card that says what it is."""
