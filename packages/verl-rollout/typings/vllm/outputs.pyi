from collections.abc import Sequence
from typing import ClassVar

from vllm.logprobs import FlatLogprobs

class WeightVersionSpan:
    version: str
    start: int
    end: int

class CompletionOutput:
    __dataclass_fields__: ClassVar[dict[str, object]]
    token_ids: Sequence[int]
    logprobs: FlatLogprobs | None
    finish_reason: str | None
    weight_versions: list[WeightVersionSpan] | None

class RequestOutput:
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None
