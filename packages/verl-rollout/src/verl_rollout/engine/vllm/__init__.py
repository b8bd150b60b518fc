"""The production engine: one vLLM `AsyncLLM` per replica, on GPUs or on the CPU build. Start at `engine.VLLMEngine`.

Nothing here imports vLLM before an engine is created, so that a config can be checked where vLLM is slow to load.
"""
