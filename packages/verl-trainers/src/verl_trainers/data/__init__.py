"""Data: rows from files, tokenized prompts in a reproducible order."""
