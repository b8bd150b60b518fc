"""The embedded engine: iteration-level batching over a transformers model, on CPU. Start at `engine.TorchEngine`."""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError("the embedded engine needs torch: pip install 'verl-rollout[torch]'", name="torch")
