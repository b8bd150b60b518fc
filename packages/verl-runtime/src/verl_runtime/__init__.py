"""Where the processes of a post-training run live."""

__version__ = "0.1.0"

__all__ = ["__version__"]
