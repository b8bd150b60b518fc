"""RL post-training of language models: algorithms, workers, one loop and its modes."""

__version__ = "0.1.0"

__all__ = ["__version__"]
