"""What runs inside vLLM's own worker processes. Imported there, and nowhere else."""

from importlib.util import find_spec

if find_spec("vllm") is None:
    raise ImportError("the vLLM engine needs vLLM: pip install 'verl-rollout[vllm]'", name="vllm")
