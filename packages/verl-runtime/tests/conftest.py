"""One Ray cluster for the modules that need one, started once and given back in the end."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the tests of RayRuntime need ray: pip install 'verl-runtime[ray]'")
    from verl_runtime.ray.connection import Connection

    with Connection(address=None, num_cpus=2, object_store_mb=256):
        yield
