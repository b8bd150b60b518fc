class ModelConfig:
    hf_text_config: object
    def get_vocab_size(self) -> int: ...

class ParallelConfig:
    data_parallel_index: int
    world_size: int
    rank: int

class VllmConfig:
    parallel_config: ParallelConfig
    model_config: ModelConfig
