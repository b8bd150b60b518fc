from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig

@dataclass
class WeightTransferInitInfo: ...

@dataclass
class WeightTransferUpdateInfo: ...

@dataclass
class WeightTransferInitRequest:
    init_info: dict[str, Any] = field(default_factory=dict)

@dataclass
class WeightTransferUpdateRequest:
    update_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)

TInit = TypeVar("TInit", bound=WeightTransferInitInfo)
TUpdate = TypeVar("TUpdate", bound=WeightTransferUpdateInfo)

class WeightTransferEngine(Generic[TInit, TUpdate]):
    init_info_cls: type[TInit]
    update_info_cls: type[TUpdate]
    supports_draft_weight_update: bool
    config: WeightTransferConfig
    vllm_config: VllmConfig
    parallel_config: ParallelConfig
    model_config: ModelConfig
    device: torch.device
    model: torch.nn.Module
    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None: ...
    def init_transfer_engine(self, init_info: TInit) -> None: ...
    def start_weight_update(self) -> None: ...
    def receive_weights(self, update_info: TUpdate) -> None: ...
    def finish_weight_update(self) -> None: ...
    def shutdown(self) -> None: ...
