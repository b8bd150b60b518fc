"""Runs of a part: only validation, only generation, or only training on what was generated before.

Each is the whole run with something left out, and goes through the same loop.
"""
