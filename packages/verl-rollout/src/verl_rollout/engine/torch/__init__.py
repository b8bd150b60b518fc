"""The embedded engine: iteration-level batching over a transformers model, on CPU. Start at `engine.TorchEngine`."""
