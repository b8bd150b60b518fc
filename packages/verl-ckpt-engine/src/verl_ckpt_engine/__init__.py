"""Verified weight movement from a trainer to inference replicas."""

__version__ = "0.1.0"

__all__ = ["__version__"]
