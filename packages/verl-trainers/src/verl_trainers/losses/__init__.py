"""Losses by token, and the one place where they become a number."""
