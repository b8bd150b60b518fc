"""What upstream tells an engine: taken where that engine is offered, listed with the reason where it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_trainers.config.build import build_run_config
from verl_trainers.config.check import check_relations
from verl_trainers.config.sources import Sources
from verl_trainers.convert.inputs import read_input
from verl_trainers.convert.rows import COST, DEFAULT, MAPPED, SAME, UNSUPPORTED, Fate
from verl_trainers.convert.settings import nested, offered
from verl_trainers.convert.translate import Conversion, convert

ROLLOUT = "actor_rollout_ref.rollout"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.engine_args"
VLLM = f"{ROLLOUT}.name=vllm"
CONFIG = Path(__file__).parent / "verl_configs" / "vllm_parallel.sh"
Offer = Callable[..., None]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Install a verl-rollout that offers the named engines, in front of the real one if there is one."""
    offered.cache_clear()

    def install(*engines: str) -> None:
        info = tmp_path / "verl_rollout-0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl-rollout\nVersion: 0.0\n")
        lines = "\n".join(f"{name} = no_module:{name}" for name in engines)
        (info / "entry_points.txt").write_text(f"[verl_rollout.engines]\n{lines}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    offered.cache_clear()


def fate_of(*words: str) -> Fate:
    return convert(read_input(list(words))).fates[-1][1]


def mistakes_in(conversion: Conversion) -> list[str]:
    tree = nested({key: line.value for key, line in conversion.recipe.items()})
    config, mistakes = build_run_config(Sources(tree=tree, places={}))
    return [str(mistake) for mistake in [*mistakes, *check_relations(config)]]


OPTIONS = [
    ("gpu_memory_utilization", 0.6),
    ("enforce_eager", False),
    ("enable_prefix_caching", True),
    ("enable_chunked_prefill", True),
    ("max_num_batched_tokens", 16384),
    ("data_parallel_size", 2),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_an_option_is_the_same_when_its_engine_is_offered(name: str, value: object, offer: Offer) -> None:
    offer("torch", "vllm")
    for key in (f"{ROLLOUT}.{name}", f"{ROLLOUT}.engine_kwargs.vllm.{name}"):
        fate = fate_of(VLLM, f"{key}={value}")
        assert fate.kind == (SAME if key.endswith(f"rollout.{name}") else MAPPED)
        assert fate.values == {f"{ROLLOUT}.{name}": value}


@pytest.mark.parametrize(
    ("name", "value", "kind", "why"),
    [
        ("gpu_memory_utilization", 0.6, UNSUPPORTED, "the cache grows with what is asked for"),
        ("enforce_eager", False, DEFAULT, "is the engine's own choice"),
        ("enable_prefix_caching", True, DEFAULT, "is the engine's own choice"),
        ("enable_chunked_prefill", True, DEFAULT, "is the engine's own choice"),
        ("max_num_batched_tokens", 16384, UNSUPPORTED, "is the engine's own choice"),
        ("data_parallel_size", 2, UNSUPPORTED, "a replica is one engine"),
        ("cudagraph_capture_sizes", [1, 2], UNSUPPORTED, "the embedded engine has no options"),
        ("engine_kwargs.vllm.enforce_eager", True, UNSUPPORTED, "the embedded engine has no options"),
        ("engine_kwargs.vllm.block_size", 32, UNSUPPORTED, "the embedded engine has no options"),
        ("engine_kwargs.kv_cache_gib", 2, UNSUPPORTED, "the embedded engine has no options"),
    ],
)
def test_an_option_is_listed_with_the_reason_when_the_embedded_engine_stands_in(
    name: str, value: object, kind: str, why: str, offer: Offer
) -> None:
    offer("torch")
    conversion = convert(read_input([VLLM, f"{ROLLOUT}.{name}={value}"]))
    fates = [fate for _, fate in conversion.fates]
    assert [fate.kind for fate in fates] == [UNSUPPORTED, kind]
    assert fates[0].why == "no engine is called 'vllm'; installed: torch"
    assert fates[1].why == why
    assert (fates[1].values, fates[1].loses == COST) == ({}, kind == UNSUPPORTED)
    assert conversion.recipe[f"{ROLLOUT}.name"].value == "torch"
    assert not [key for key in conversion.recipe if key.endswith(f".{name}") or "engine_kwargs" in key]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("engine_kwargs.vllm.block_size=32", {f"{ARGUMENTS}.block_size": 32}),
        ("engine_kwargs.vllm.compilation_config.mode=3", {f"{ARGUMENTS}.compilation_config.mode": 3}),
        ("cudagraph_capture_sizes=[1,2]", {f"{ARGUMENTS}.cudagraph_capture_sizes": [1, 2]}),
        ("engine_kwargs.vllm.dtype=half", {}),
        ("engine_kwargs.vllm.dtype=auto", {f"{ROLLOUT}.dtype": "bfloat16"}),
        ("engine_kwargs.vllm.max_num_seqs=7", {f"{ROLLOUT}.max_num_seqs": 7}),
        ("engine_kwargs.vllm.tensor_parallel_size=2", {f"{ROLLOUT}.tensor_model_parallel_size": 2}),
    ],
)
def test_an_argument_of_vllm_goes_where_it_is_taken(word: str, values: dict[str, object], offer: Offer) -> None:
    offer("torch", "vllm")
    fate = fate_of(VLLM, f"{ROLLOUT}.{word}")
    assert (fate.kind, fate.values) == (MAPPED if values else UNSUPPORTED, values)


@pytest.mark.parametrize(
    ("word", "kind", "why"),
    [
        ("engine_kwargs.vllm.seed=3", DEFAULT, "random numbers follow trainer.seed"),
        ("engine_kwargs.vllm.load_format=auto", DEFAULT, "weights come by the first sync"),
        ("engine_kwargs.vllm.logprobs_mode=raw_logprobs", UNSUPPORTED, "log-probs are those of what was sampled from"),
        ("engine_kwargs.vllm.model=x", UNSUPPORTED, "the model has a key"),
        ("engine_kwargs.vllm={}", DEFAULT, "its arguments have names"),
        ("engine_kwargs.vllm.block_size=null", DEFAULT, "not set"),
        ("engine_kwargs.sglang={}", DEFAULT, "options of another engine"),
        ("engine_kwargs.sglang.attention_backend=fa3", UNSUPPORTED, "options of another engine"),
        ("gpu_memory_utilization=null", DEFAULT, "not set"),
        ("load_format=dummy", DEFAULT, "weights come by the first sync"),
    ],
)
def test_what_vllm_is_not_told_has_its_reason(word: str, kind: str, why: str, offer: Offer) -> None:
    offer("torch", "vllm")
    fate = fate_of(VLLM, f"{ROLLOUT}.{word}")
    assert (fate.kind, fate.why, fate.values) == (kind, why, {})


def test_arguments_of_vllm_have_no_effect_beside_another_engine(offer: Offer) -> None:
    offer("torch", "vllm")
    fate = fate_of(f"{ROLLOUT}.name=hf", f"{ROLLOUT}.engine_kwargs.vllm.block_size=32")
    assert (fate.kind, fate.why) == (DEFAULT, f"no effect unless {ROLLOUT}.name is vllm")


def test_our_own_form_is_taken_as_it_is(offer: Offer) -> None:
    offer("torch", "vllm")
    words = [f"{ARGUMENTS}.block_size=32", f"{ROLLOUT}.engine_kwargs.kv_cache_gib=2", "trainer.nnodes=1"]
    conversion = convert(read_input([VLLM, *words]))
    assert [fate.kind for _, fate in conversion.fates] == [SAME, SAME, SAME, DEFAULT]


@pytest.mark.parametrize(("engines", "engine"), [(("torch", "vllm"), "vllm"), (("torch",), "torch")])
def test_a_launch_of_vllm_is_a_recipe_for_what_is_offered(engines: tuple[str, ...], engine: str, offer: Offer) -> None:
    offer(*engines)
    conversion = convert(read_input([str(CONFIG)]))
    assert conversion.recipe[f"{ROLLOUT}.name"].value == engine
    assert conversion.is_whole == (engine == "vllm")
    assert mistakes_in(conversion) == []
