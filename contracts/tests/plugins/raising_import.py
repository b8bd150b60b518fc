"""Raises while it is imported."""

raise ZeroDivisionError("at import")
