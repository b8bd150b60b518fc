"""What this package uses of FastAPI, which vLLM brings."""

from collections.abc import Awaitable, Callable, MutableMapping

class State:
    def __setattr__(self, name: str, value: object) -> None: ...

class FastAPI:
    state: State
    def __init__(self, *, openapi_url: str | None, docs_url: str | None, redoc_url: str | None) -> None: ...
    async def __call__(
        self,
        scope: MutableMapping[str, object],
        receive: Callable[[], Awaitable[MutableMapping[str, object]]],
        send: Callable[[MutableMapping[str, object]], Awaitable[None]],
    ) -> None: ...
