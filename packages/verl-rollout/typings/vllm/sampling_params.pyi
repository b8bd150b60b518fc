from enum import Enum

class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

class SamplingParams:
    seed: int | None
    def __init__(
        self,
        *,
        max_tokens: int | None = 16,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_token_ids: list[int] | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        flat_logprobs: bool = False,
        detokenize: bool = True,
        output_kind: RequestOutputKind = ...,
        stream_interval: int | None = None,
    ) -> None: ...
