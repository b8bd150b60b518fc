from argparse import Namespace

from fastapi import State

async def init_app_state(
    engine_client: object, state: State, args: Namespace, supported_tasks: tuple[str, ...] | None = None
) -> None: ...
