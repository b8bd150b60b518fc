class FlatLogprobs:
    start_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]
