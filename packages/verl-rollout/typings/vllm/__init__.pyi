"""What this package uses of vLLM, and believes of it."""

__version__: str
