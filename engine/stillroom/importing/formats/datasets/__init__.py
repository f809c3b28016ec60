"""Readers of datasets of conversations: fine-tuning files, ShareGPT, Alpaca, tables."""
