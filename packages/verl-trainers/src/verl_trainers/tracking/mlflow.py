"""Metrics to MLflow; to a database file in the run folder by default."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from verl_trainers.tracking.libraries import require
from verl_trainers.tracking.tree import flat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.tracking import RunEnd, TrackedRun, Tracker

__all__ = ["MlflowTracker"]

STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MAX_PARAMS, MAX_METRICS = 100, 1000
"""Most that MLflow takes in one call."""
MAX_TEXT = 5000
"""Longest parameter or tag, in characters."""


class _Experiment(Protocol):
    @property
    def experiment_id(self) -> str: ...


class _RunInfo(Protocol):
    @property
    def run_id(self) -> str: ...


class _Run(Protocol):
    @property
    def info(self) -> _RunInfo: ...


class _Client(Protocol):
    """What is used of an `MlflowClient`, which unlike MLflow's functions holds no state of the thread or process."""

    def get_experiment_by_name(self, name: str) -> _Experiment | None: ...

    def create_experiment(self, name: str, artifact_location: str | None) -> str: ...

    def create_run(self, experiment_id: str, *, run_name: str) -> _Run: ...

    def log_batch(
        self, run_id: str, *, metrics: Sequence[object] = (), params: Sequence[object] = (), tags: Sequence[object] = ()
    ) -> None: ...

    def set_terminated(self, run_id: str, status: str) -> None: ...


class MlflowTracker:
    """Writes an MLflow run. Keys of the configuration are its parameters, the summary its tags.

    Look at the default store with ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db``.
    """

    def __init__(self, *, tracking_uri: str | None = None, experiment: str = "verl", name: str | None = None) -> None:
        """Write to `tracking_uri`; None means a file in the run folder. `name` None means that of the run folder."""
        require("mlflow", extra="mlflow")
        if tracking_uri is None:
            for module in ("sqlalchemy", "alembic"):
                require(module, extra="mlflow")
        self._uri = tracking_uri
        self._experiment = experiment
        self._name = name
        self._client: _Client | None = None
        self._run_id = ""

    def start(self, run: TrackedRun, /) -> None:
        """Open the store, find or make the experiment, and begin the run."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        artifacts = None
        uri = self._uri
        if uri is None:
            folder = Path(run.run_dir) / "mlflow"
            folder.mkdir(exist_ok=True)
            uri = f"sqlite:///{folder / 'mlflow.db'}"
            artifacts = (folder / "artifacts").as_uri()
        client: _Client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(self._experiment)
        experiment = (
            client.create_experiment(self._experiment, artifact_location=artifacts)
            if known is None
            else known.experiment_id
        )
        self._run_id = client.create_run(experiment, run_name=self._name or run.name).info.run_id
        params = [Param(_key(name), str(value)[:MAX_TEXT]) for name, value in flat(run.config)]
        for first in range(0, len(params), MAX_PARAMS):
            client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS])
        self._client = client

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Write the metrics of `step` in one transaction."""
        if self._client is None:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(_key(name), value, now, step) for name, value in metrics.items()]
        for first in range(0, len(rows), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=rows[first : first + MAX_METRICS])

    def close(self, end: RunEnd, /) -> None:
        """Add the summary, and end the run with its outcome."""
        if self._client is None:
            return
        from mlflow.entities import RunTag

        client, self._client = self._client, None
        values = {**end.summary, **({} if end.error is None else {"error": end.error})}
        tags = [RunTag(_key(f"summary.{name}"), json.dumps(value)[:MAX_TEXT]) for name, value in values.items()]
        try:
            client.log_batch(self._run_id, tags=tags)
        finally:
            client.set_terminated(self._run_id, STATUS[end.outcome])


def _key(name: str) -> str:
    """Return `name` with what MLflow allows in names."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


if TYPE_CHECKING:

    def _is_tracker(x: MlflowTracker) -> Tracker:
        return x
