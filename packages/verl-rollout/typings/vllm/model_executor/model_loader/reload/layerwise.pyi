import torch

class LayerReloadingInfo:
    load_numel: int
    load_numel_total: int | None
    def can_load(self) -> bool: ...

def get_layerwise_info(layer: torch.nn.Module) -> LayerReloadingInfo: ...
