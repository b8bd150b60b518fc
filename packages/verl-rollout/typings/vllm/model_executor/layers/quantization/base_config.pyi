import torch

class QuantizeMethodBase:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...
