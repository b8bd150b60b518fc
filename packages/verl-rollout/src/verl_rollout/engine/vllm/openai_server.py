"""The OpenAI protocol over one replica's vLLM: vLLM's own routes and serving classes, behind the engine's gate.

Owns the socket, the key and the HTTP server, which runs on the engine's event loop because `AsyncLLM` belongs to it.
What an HTTP request asks of vLLM goes through a `Relay`, so that it waits while the engine is paused, begins under
committed weights, shares no cached prefix with requests of other versions, and is counted and cut like all others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
from contextlib import aclosing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from verl_contracts.clock import Deadline
from verl_contracts.errors import ConfigError, DataError, WaitTimeout
from verl_contracts.rollout import OpenAIEndpoint
from verl_contracts.waits import bounded
from verl_rollout.engine.vllm.answers import told_versions
from verl_rollout.engine.vllm.builds import on_cpu
from verl_rollout.engine.vllm.openai_guard import EXCHANGE, Guard

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import AsyncGenerator, Callable, Mapping

    import uvicorn
    from fastapi import FastAPI
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import ReplicaStatus, RolloutSettings
    from verl_rollout.engine.vllm.options import VLLMOptions

__all__ = ["OpenAIServer", "Relay"]

_log = logging.getLogger(__name__)

_TASKS: Final = ("generate",)
_KEY: Final = "actor_rollout_ref.rollout.engine_kwargs.openai_args"
_LIMIT_KEY: Final = "actor_rollout_ref.rollout.request_limit_s"
_GRACE_S: Final = 2
"""How long connections may finish what they send when the server is closed."""
_CLOSE_LIMIT_S: Final = 10.0
_CUT_EVERY_S: Final = 0.1


class Relay(Protocol):
    """The engine's gate, for requests that are made elsewhere."""

    def __call__(
        self, name: str, ask: Callable[[int], AsyncGenerator[RequestOutput]], /, *, deadline: Deadline
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Call `ask` with the version of the weights once it may run; yield that and what vLLM puts out.

        Raises `StateError` when it may never run, `WaitTimeout` at the deadline, and the engine's first error when it
        is dead.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Running:
    endpoint: OpenAIEndpoint
    server: uvicorn.Server
    loop: asyncio.Task[None]
    sock: socket.socket


class OpenAIServer:
    """The endpoint of one replica. Listens from the first call of `endpoint` until `close`."""

    def __init__(
        self,
        llm: AsyncLLM,
        settings: RolloutSettings,
        options: VLLMOptions,
        *,
        replica_id: str,
        clock: Clock,
        relay: Relay,
        status: Callable[[], ReplicaStatus],
    ) -> None:
        self._llm = _RelayedLLM(llm, relay, limit_s=settings.request_limit_s, clock=clock)
        self._settings = settings
        self._options = options
        self._replica_id = replica_id
        self._clock = clock
        self._status = status
        self._starting = asyncio.Lock()
        self._running: _Running | None = None

    async def endpoint(self, *, deadline: Deadline) -> OpenAIEndpoint:
        """Return where it listens; starts it when it does not yet."""
        return await bounded(
            self._started(),
            subject="the start of its OpenAI endpoint",
            holder=self._replica_id,
            deadline=deadline,
            clock=self._clock,
        )

    async def close(self) -> None:
        """Let running requests come back cut, and listen no more. Idempotent."""
        running, self._running = self._running, None
        if running is None:
            return
        running.server.should_exit = True
        try:
            await bounded(
                self._stop(running),
                subject="the end of its OpenAI endpoint",
                holder=self._replica_id,
                deadline=Deadline.after(self._clock, _CLOSE_LIMIT_S),
                clock=self._clock,
            )
        except WaitTimeout as exc:
            _log.warning("%s", exc)
        finally:
            running.loop.cancel()
            running.sock.close()

    async def _stop(self, running: _Running) -> None:
        cutting = asyncio.create_task(self._llm.cut())
        try:
            await running.loop  # wait: `close` bounds it
            await running.server.shutdown([running.sock])
        finally:
            cutting.cancel()

    async def _started(self) -> OpenAIEndpoint:
        async with self._starting:
            if self._running is None:
                sock = socket.create_server((self._options.openai_host, 0))
                try:
                    self._running = await self._start(sock)
                except BaseException:
                    sock.close()
                    raise
            return self._running.endpoint

    async def _start(self, sock: socket.socket) -> _Running:
        import uvicorn
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state

        model = Path(self._settings.model_path).name
        args = await asyncio.to_thread(_arguments, self._settings, self._options, model)
        app = await asyncio.to_thread(_build_app, args)
        await init_app_state(self._llm, app.state, args, _TASKS)
        api_key = secrets.token_urlsafe(32)
        config = uvicorn.Config(
            Guard(app, api_key=api_key, status=self._status),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        config.load()
        # The parts of `serve`, which would also take over the signals of the process.
        server = app.state.server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup([sock])
        host, port = sock.getsockname()[:2]
        endpoint = OpenAIEndpoint(base_url=f"http://{host}:{port}/v1", api_key=api_key, model=model)
        _log.info("%s answers the OpenAI protocol at %s", self._replica_id, endpoint.base_url)
        return _Running(endpoint=endpoint, server=server, loop=asyncio.create_task(server.main_loop()), sock=sock)


class _RelayedLLM:
    """`AsyncLLM` as vLLM's serving classes see it; what they generate goes through the gate."""

    def __init__(self, llm: AsyncLLM, relay: Relay, *, limit_s: float, clock: Clock) -> None:
        self._llm = llm
        self._relay = relay
        self._limit_s = limit_s
        self._clock = clock
        self._names: set[str] = set()
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> object:
        return getattr(self._llm, name)

    async def generate(
        self, prompt: Mapping[str, object], sampling_params: SamplingParams, request_id: str, **more: object
    ) -> AsyncGenerator[RequestOutput]:
        """Generate as `AsyncLLM.generate` does, under a name that no other request has."""
        from vllm.exceptions import GenerationError

        exchange = EXCHANGE.get()  # wait: none, it is a context variable
        name = f"http-{next(self._numbers)}-{request_id}"

        def ask(version: int) -> AsyncGenerator[RequestOutput]:
            # The salt makes the version part of a prefix's identity, as it does for all other requests.
            own = prompt.get("cache_salt")
            salt = f"v{version}" if own is None else f"v{version}-{own}"
            return self._llm.generate({**prompt, "cache_salt": salt}, sampling_params, name, **more)

        self._names.add(name)
        try:
            if sampling_params.seed is not None and on_cpu():
                raise DataError("vLLM's CPU build dies when a request with a seed is paused: ask without `seed`")
            deadline = Deadline.after(self._clock, self._limit_s, setting=_LIMIT_KEY)
            async with aclosing(self._relay(name, ask, deadline=deadline)) as outputs:
                async for version, output in outputs:
                    exchange.note([version])
                    for part in output.outputs:
                        exchange.note(int(span.version) for span in told_versions(part) or ())
                    yield output
        except (DataError, RuntimeError, WaitTimeout) as exc:  # a dead engine's first error may be any RuntimeError
            exchange.refused = (400 if isinstance(exc, DataError) else 503, str(exc))
            raise GenerationError(str(exc)) from exc  # the one that vLLM's streams pass on without a traceback
        finally:
            self._names.remove(name)

    async def cut(self) -> None:
        """Cut what runs, with the finish reason `abort`, until cancelled: what has just come is not in vLLM yet."""
        while True:
            await self._llm.abort(list(self._names))
            await asyncio.sleep(_CUT_EVERY_S)


def _arguments(settings: RolloutSettings, options: VLLMOptions, model: str) -> Namespace:
    """Return the arguments of vLLM's server, as its command line would. Raises `ConfigError` for those it has not."""
    from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs, make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = {field.name for field in fields(BaseFrontendArgs)} - {"lora_modules"}  # adapters come through the replica
    if unknown := sorted(options.openai_args.keys() - known):
        raise ConfigError(f"{_KEY}: vLLM's server has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    ours = {"model": settings.model_path, "served_model_name": [model], "disable_log_stats": True}
    for name, value in {**options.openai_args, **ours}.items():
        setattr(args, name, value)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{_KEY}: vLLM's server refuses them: {exc}") from exc
    return args


def _build_app(args: Namespace) -> FastAPI:
    """Return vLLM's routes for the protocol, and not its whole server: nothing here steers the engine."""
    from fastapi import FastAPI
    from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
    from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completion
    from vllm.entrypoints.openai.models.api_router import attach_router as attach_models
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.entrypoints.serve.tokenize.api_router import attach_router as attach_tokenize

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.args = args
    for attach in (attach_models, attach_chat, attach_completion, attach_tokenize):
        attach(app)
    init_exception_handler(app)
    return app
