class WeightTransferConfig:
    backend: str
