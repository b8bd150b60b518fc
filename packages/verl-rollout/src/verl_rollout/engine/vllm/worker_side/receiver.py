"""Our receiver inside a vLLM worker, as a weight-transfer engine of vLLM's own kind: one adapter for every backend.

vLLM calls `start_weight_update`, `update_weights` and `finish_weight_update` on the worker's thread. The tensors go
through `model.load_weights` inside vLLM's layerwise reload, because kernels may keep weights in another layout than
checkpoints do. Everything else, preparing, aborting and the report, comes through `control`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.plugins import build_plugin, families
from verl_contracts.weights import LoadReport
from verl_rollout.engine.receiving import receiver_class
from verl_rollout.engine.torch.checkpoint import some
from verl_rollout.engine.vllm.control import ControlServer, socket_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

    from verl_contracts.weights import EndpointInfo, Plan, TensorMeta, TransferReport, WeightReceiver, WeightTarget

_CHECKED: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Types that can be looked through for their extremes."""

__all__ = ["HostedReceiver", "InitInfo", "UpdateInfo"]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a replica tells each of its workers once."""

    folder: str
    """Private folder for the sockets."""
    key: str
    backend: str
    """Name or class path of the `WeightBackend`."""
    owner: str
    """Replica id."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update. What is received is in the plan, which came by `expect`."""

    session: str


class HostedReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Hosts the `WeightReceiver` of one worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        self._rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._clock = SystemClock()
        self._control: ControlServer | None = None
        self._receiver: WeightReceiver | None = None
        self._expected: tuple[Plan, Deadline] | None = None
        self._outcome: TransferReport | Exception = StateError("nothing was received yet")
        self._reloading = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Make the receiver and listen for the replica."""
        self.shutdown()
        self._receiver = build_plugin(
            receiver_class(init_info.backend, role=init_info.owner),
            {},
            key=families.WEIGHT_BACKEND.key,
            arguments={"owner": init_info.owner, "clock": self._clock},
        )
        methods: dict[str, Callable[..., object]] = {
            "prepare": self._prepare,
            "expect": self._expect,
            "report": self._report,
            "abort": self._abort,
            "close": self._close,
        }
        self._control = ControlServer(socket_path(init_info.folder, self._rank), bytes.fromhex(init_info.key), methods)

    def start_weight_update(self) -> None:
        """Take the model apart, layer by layer, so that checkpoint tensors can be loaded."""
        self._reloading = True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the whole stream. What goes wrong is told by `report` with its cause, and to vLLM in one line."""
        try:
            self._outcome = self._receive(update_info.session)
        except Exception as exc:
            self._outcome = exc
            # A layer that is half loaded would take the first tensors of the next update for its missing ones.
            self._finish()
            raise

    def finish_weight_update(self) -> None:
        """Put the model together again."""
        self._finish()

    def shutdown(self) -> None:
        """End a transfer that is under way, and drop the receiver."""
        if self._receiver is not None:
            self._receiver.abort("the vLLM worker ends")
            self._receiver.close()
            self._receiver = None
        if self._control is not None:
            self._control.close()
            self._control = None

    def _finish(self) -> None:
        if self._reloading:
            self._reloading = False
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                _pack_tied(self.model)

    def _prepare(self, session: str) -> EndpointInfo:
        return self._hosted().prepare(session=session, rank=self._rank)

    def _expect(self, plan: Plan, limit_s: float) -> None:
        self._expected = (plan, Deadline.after(self._clock, limit_s))
        self._outcome = StateError(f"session {plan.session} was not received")

    def _report(self) -> TransferReport:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def _abort(self, reason: str) -> None:
        self._hosted().abort(reason)

    def _close(self) -> None:
        self._expected = None
        if self._receiver is not None:
            self._receiver.close()

    def _receive(self, session: str) -> TransferReport:
        if self._expected is None or self._expected[0].session != session:
            raise StateError(f"an update by session {session!r} was asked for, and its plan never came")
        plan, deadline = self._expected
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        return self._hosted().receive(plan, _Target(self.model, self.device, tied=tied), deadline=deadline)

    def _hosted(self) -> WeightReceiver:
        if self._receiver is None:
            raise StateError("this vLLM worker has no receiver; init_weight_transfer_engine was not called")
        return self._receiver


def _pack_tied(model: torch.nn.Module) -> None:
    """Pack weights that a layer shares with another one again.

    The CPU build computes with packed copies. It makes them for layers that were loaded, and a tied head is not: it
    would go on with the head of the weights before.
    """
    seen: set[int] = set()
    for layer in model.modules():
        shared = [parameter for parameter in layer.parameters(recurse=False) if id(parameter) in seen]
        seen.update(id(parameter) for parameter in layer.parameters(recurse=False))
        method = getattr(layer, "quant_method", None)
        if shared and isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)


def _without_wrapper(name: str) -> str:
    """Return the name of a parameter in a model without adapters: with them, each layer lies inside a wrapper."""
    return name.replace(".base_layer.", ".")


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinity: what they leave in the cache spoils answers under good weights, too."""
    if tensor.numel() and tensor.dtype in _CHECKED and not all(math.isfinite(end) for end in torch.aminmax(tensor)):
        raise WeightSyncError("transfer", "it holds values that are not finite", name)


class _LoadsWeights(Protocol):
    """Every model of vLLM."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], /) -> object:
        """Load checkpoint tensors; return the names of the parameters that they went into, or None."""
        ...


class _Target:
    """Loads canonical tensors through vLLM's loaders, which shard, fuse and convert them."""

    def __init__(self, model: torch.nn.Module, device: torch.device, *, tied: bool) -> None:
        self._model = model
        self._device = device
        names = (_without_wrapper(name) for name, _ in model.named_parameters())
        self._wanted = {name for name in names if not (tied and name.startswith("lm_head."))}

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        """Load each tensor. Raises `WeightSyncError` naming the tensor that does not fit, or what did not arrive."""
        names: list[str] = []

        def given() -> Iterator[tuple[str, torch.Tensor]]:
            for meta, tensor in items:
                names.append(meta.name)
                _check_finite(meta.name, tensor)
                # A copy, always: vLLM holds tensors until their layer is complete, and ours lives until the next one.
                yield meta.name, tensor.to(self._device, copy=True)

        try:
            loaded = cast("_LoadsWeights", self._model).load_weights(given())
        except WeightSyncError:
            raise
        except Exception as exc:
            last = names[-1] if names else None
            raise WeightSyncError("transfer", f"vLLM could not load it: {type(exc).__name__}: {exc}", last) from exc
        if isinstance(loaded, set) and (missing := self._wanted - {_without_wrapper(name) for name in loaded}):
            raise WeightSyncError("transfer", f"{len(missing)} parameters of vLLM's were not loaded: {some(missing)}")
        return LoadReport(loaded=tuple(names))


if TYPE_CHECKING:

    def _is_target(x: _Target) -> WeightTarget:
        return x
