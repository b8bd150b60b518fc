"""The estimate of memory: equal to what is counted by hand, and judged against what there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from config_cases import GOOD
from model_folders import QWEN_05B, TINY, write_model_folder
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl_contracts.training import ModePlan, Placement, Schedule
from verl_trainers.config.load import load_config
from verl_trainers.config.schema import RunConfig
from verl_trainers.preflight.devices import gib, judge_memory
from verl_trainers.preflight.memory import Part, RoleMemory, estimate_memory
from verl_trainers.preflight.model import ModelFacts, read_model

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def config_of(*overrides: str) -> RunConfig:
    return load_config(None, [*GOOD, "trainer.device=cpu", *overrides])


def plan(*, ranks: int = 1, hybrid: bool = False, standalone: int = 1, sleeps: bool = False) -> ModePlan:
    return ModePlan(
        placement=Placement(trainer_devices=ranks, hybrid=hybrid, standalone_devices=0 if hybrid else standalone),
        schedule=Schedule(max_staleness=0, sleep_while_training=sleeps),
    )


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return read_model(str(write_model_folder(tmp_path_factory.mktemp("qwen"), QWEN_05B)))


def build_model(folder: str) -> PreTrainedModel:
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    return build(AutoConfig.from_pretrained(folder), attn_implementation="sdpa")


EMBEDDING = 151936 * 896
ATTENTION = 896 * 896 + 896 + 2 * (896 * 128 + 128) + 896 * 896
BLOCK = ATTENTION + 3 * 896 * 4864 + 2 * 896
PARAMETERS = EMBEDDING + 24 * BLOCK + 896
"""Counted by hand: q with bias, k and v with bias, o; gate, up, down; two norms; tied head; the last norm."""


def test_the_parameters_are_those_counted_by_hand(qwen: ModelFacts) -> None:
    assert PARAMETERS == 494_032_768
    assert qwen.num_parameters == PARAMETERS
    assert (qwen.largest_tensor, qwen.largest_block, qwen.outside_blocks) == (EMBEDDING, BLOCK, EMBEDDING + 896)
    assert qwen.kv_elements == 24 * 2 * 2 * 64
    assert qwen.max_positions == 32768


@pytest.mark.parametrize(
    ("dtype", "ranks", "weights", "gradients", "optimizer"),
    [("float32", 1, 4, 4, 8), ("bfloat16", 1, 2, 6, 12), ("float32", 4, 1, 1, 2), ("bfloat16", 2, 2, 2, 4)],
)
def test_weights_gradients_and_optimizer_are_those_counted_by_hand(
    qwen: ModelFacts, dtype: str, ranks: int, weights: int, gradients: int, optimizer: int
) -> None:
    policy, _ = estimate_memory(config_of(f"{ACTOR}.fsdp_config.model_dtype={dtype}"), plan(ranks=ranks), qwen)
    assert policy.processes == ranks
    assert policy.of("weights") == pytest.approx(weights * PARAMETERS, rel=1e-6)
    assert policy.of("gradients") == pytest.approx(gradients * PARAMETERS, rel=1e-6)
    assert policy.of("optimizer") == pytest.approx(optimizer * PARAMETERS, rel=1e-6)


def test_the_optimizer_really_keeps_as_much(tmp_path: Path) -> None:
    folder = str(write_model_folder(tmp_path, TINY))
    model = build_model(folder)
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    moments = [t for state in adam.state.values() for t in state.values() if t.dim() > 0]
    policy, _ = estimate_memory(config_of(), plan(), read_model(folder))
    assert policy.of("optimizer") == sum(t.nbytes for t in moments)
    assert policy.of("weights") == sum(p.nbytes for p in model.parameters())


def test_activations_are_about_what_the_backward_pass_keeps(tmp_path: Path) -> None:
    wide = {**TINY, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 512, "num_hidden_layers": 4}
    folder = str(write_model_folder(tmp_path, wide))
    model = build_model(folder)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(input_ids=torch.zeros(4, 32, dtype=torch.int64), use_cache=False).logits
    small = ["data.max_prompt_length=16", "data.max_response_length=16", "data.train_batch_size=2", f"{ROLLOUT}.n=2"]
    policy, _ = estimate_memory(config_of(*small), plan(), read_model(folder))
    assert policy.of("activations") == pytest.approx(sum(kept.values()) + logits.nbytes, rel=0.35)


def test_a_replica_keeps_weights_and_full_sequences(qwen: ModelFacts) -> None:
    config = config_of(f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.max_num_seqs=10")
    _, replica = estimate_memory(config, plan(standalone=3), qwen)
    assert replica.processes == 3
    assert replica.of("weights") == 2 * PARAMETERS
    assert replica.of("KV cache") == 2 * 10 * 1024 * 24 * 2 * 128
    assert replica.of("weight wire buffer") == 32 * 2**20 + 2 * EMBEDDING
    split = config_of(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2")
    _, replica = estimate_memory(split, plan(standalone=2), qwen)
    assert replica.processes == 2
    assert replica.of("weights") == 2 * PARAMETERS
    copies = config_of(f"{ROLLOUT}.name=vllm", *(f"{ROLLOUT}.{n}_parallel_size=2" for n in ("tensor_model", "data")))
    _, replica = estimate_memory(copies, plan(standalone=9), qwen)
    assert replica.processes == 8
    assert replica.role == "replica shard (1 of 2)"
    assert replica.of("weights") == 2 * PARAMETERS
    assert estimate_memory(copies, plan(standalone=1), qwen)[1].processes == 4


def test_a_cache_that_was_chosen_is_counted_as_chosen(qwen: ModelFacts) -> None:
    chosen = config_of(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.kv_cache_gib=7.5")
    _, replica = estimate_memory(chosen, plan(), qwen)
    assert replica.of("KV cache") == 7.5 * 2**30
    assert [part.certain for part in replica.parts if part.name == "KV cache"] == [True]


def test_a_reference_model_costs_its_weights(qwen: ModelFacts) -> None:
    own = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.fsdp_config.model_dtype=bfloat16"]
    assert estimate_memory(config_of(*own), plan(), qwen)[0].of("reference model") == 2 * PARAMETERS
    assert estimate_memory(config_of(*own), plan(ranks=2), qwen)[0].of("reference model") == 2 * PARAMETERS
    assert estimate_memory(config_of(), plan(), qwen)[0].of("reference model") == 0


def roles(certain: int, most: int) -> Sequence[RoleMemory]:
    parts = (
        Part(name="a", num_bytes=certain * 2**30),
        Part(name="b", num_bytes=(most - certain) * 2**30, certain=False),
    )
    return [RoleMemory(role=role, processes=1, parts=parts) for role in ("policy worker", "replica")]


@pytest.mark.parametrize(
    ("memory", "made", "refused", "warned"),
    [
        (25, plan(), False, False),
        (15, plan(), False, True),
        (5, plan(), True, False),
        (25, plan(hybrid=True), False, True),
        (15, plan(hybrid=True), True, False),
        (31, plan(hybrid=True), False, True),
        (31, plan(hybrid=True, sleeps=True), False, False),
    ],
)
def test_what_does_not_fit_is_refused_and_what_might_not_is_a_warning(
    memory: int, made: ModePlan, refused: bool, warned: bool
) -> None:
    verdict = judge_memory(config_of(f"trainer.device_memory_gb={memory}"), made, roles(10, 20))
    assert bool(verdict.mistakes) == refused
    assert bool(verdict.warnings) == warned
    if refused:
        assert verdict.mistakes[0].key == "actor_rollout_ref.model.path"
        assert f"has {memory} GiB (trainer.device_memory_gb)" in verdict.mistakes[0].text
        assert "trainer.n_gpus_per_node" in verdict.mistakes[0].text


def test_processes_on_cpu_share_the_machine() -> None:
    verdict = judge_memory(config_of(), plan(), roles(10**6, 10**6))
    assert "this machine needs 2e+06 GiB at least" in verdict.mistakes[0].text


def test_memory_of_a_cluster_is_not_guessed() -> None:
    verdict = judge_memory(config_of("runtime_options.address=auto"), plan(), roles(10, 20))
    assert "not known here (trainer.device_memory_gb says it)" in verdict.lines[-1]
    assert not verdict.mistakes


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * 2**20, "3 MiB"), (2**31, "2 GiB")])
def test_sizes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert gib(num_bytes) == text
