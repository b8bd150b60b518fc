"""What this package uses of uvicorn, which vLLM brings."""

import socket
from collections.abc import Callable

class Config:
    lifespan_class: Callable[[Config], object]
    def __init__(
        self,
        app: Callable[..., object],
        *,
        lifespan: str,
        ws: str,
        log_config: None,
        access_log: bool,
        proxy_headers: bool,
        server_header: bool,
        timeout_graceful_shutdown: int,
    ) -> None: ...
    def load(self) -> None: ...

class Server:
    should_exit: bool
    lifespan: object
    def __init__(self, config: Config) -> None: ...
    async def startup(self, sockets: list[socket.socket] | None = None) -> None: ...
    async def main_loop(self) -> None: ...
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None: ...
