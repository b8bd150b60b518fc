"""Recipes: YAML files that are shipped, and the functions that prepare their models and data."""
