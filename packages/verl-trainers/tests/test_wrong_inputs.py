"""Wrong inputs, one a row: each is refused before anything is started, by a line that names its key and the fix.

Most run in this process, through the function behind `check`; a handful run the command. Every configuration is right
but for what its row changes, so a second mistake in the report would be one that follows from the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from cli_cases import STANDINS
from model_folders import TINY, write_model_folder

from verl_trainers.preflight import preflight_file

pytestmark = pytest.mark.timeout(120)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path"
ROWS = [{"prompt": "a b", "reward_model": {"ground_truth": "a"}}] * 32


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data that can be trained on."""
    folder = tmp_path_factory.mktemp("world")
    write_model_folder(folder / "model", TINY)
    write_rows(folder / "train.jsonl", ROWS)
    return folder


def write_rows(file: Path, rows: object) -> Path:
    lines = rows if isinstance(rows, list) else [rows]
    file.write_text("\n".join(json.dumps(row) if not isinstance(row, str) else row for row in lines) + "\n")
    return file


def right(world: Path) -> list[str]:
    return [
        *STANDINS,
        f"data.train_files=[{world}/train.jsonl]",
        f"{MODEL}={world}/model",
        "reward.name=copy",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
    ]


def problems(world: Path, *overrides: str) -> list[str]:
    report = preflight_file(None, [*right(world), *overrides], run_dir=str(world / "run"))
    assert (report.resolved is None) == bool(report.mistakes)
    return report.problems()


def test_the_base_is_right(world: Path) -> None:
    assert problems(world) == []


# ---- values and the rules between them: key, what is said, how it is fixed

VALUES: list[tuple[str, str, str, str]] = [
    ("data.trian_files=[x]", "data.trian_files", "unknown key", "did you mean data.train_files?"),
    (
        "actor_rollout_ref.rolout.n=4",
        "actor_rollout_ref.rolout",
        "unknown key",
        "did you mean actor_rollout_ref.rollout?",
    ),
    ("trainer.total_steps=4", "trainer.total_steps", "unknown key", "did you mean trainer."),
    ("n_gpus_per_node=2", "n_gpus_per_node", "unknown key", "n_gpus_per_node?"),
    ("data=7", "data", "must be a section", "key: value lines"),
    ("data.train_batch_size=null", "data.train_batch_size", "null is not a value", "leave the key out"),
    ("data.train_files=null", "data.train_files", "null is not a value", "leave the key out"),
    (f"{MODEL}=''", MODEL, "is required", "Hugging Face folder"),
    ("actor_rollout_ref.model=null", MODEL, "is required", "Hugging Face folder"),
    ("data.train_files=[]", "data.train_files", "is required", "JSONL or parquet"),
    ("data.shuffle=yess", "data.shuffle", "'yess'", "true or false"),
    ("data.train_batch_size=many", "data.train_batch_size", "'many'", "must be a whole number"),
    ("data.train_batch_size=4.5", "data.train_batch_size", "4.5", "must be a whole number"),
    ("data.seed=true", "data.seed", "True", "must be a whole number"),
    (f"{ACTOR}.grad_clip=.inf", f"{ACTOR}.grad_clip", "inf", "must be a finite number"),
    (f"{ACTOR}.grad_clip=0", f"{ACTOR}.grad_clip", "got 0", "must be > 0"),
    ("data.system_prompt=3", "data.system_prompt", "got 3", "write it in quotes"),
    ("data.chat_template_kwargs=[1]", "data.chat_template_kwargs", "[1]", "must be options"),
    (f"{ROLLOUT}.dtype=float16", f"{ROLLOUT}.dtype", "'float16'", "'float32', 'bfloat16'"),
    (f"{ACTOR}.loss_agg_mode=token_mean", f"{ACTOR}.loss_agg_mode", "'token_mean'", "did you mean 'token-mean'?"),
    (f"{ACTOR}.optim.betas=[0.9]", f"{ACTOR}.optim.betas", "got 1", "a list of 2"),
    ("data.train_batch_size=0", "data.train_batch_size", "got 0", "must be ≥ 1"),
    ("data.train_batch_size=-16", "data.train_batch_size", "got -16", "must be ≥ 1"),
    (
        f"{ACTOR}.ppo_mini_batch_size=6",
        f"{ACTOR}.ppo_mini_batch_size",
        "16 % 6 = 4",
        "must divide data.train_batch_size",
    ),
    (f"{ROLLOUT}.n=1", f"{ROLLOUT}.n", "every advantage would be 0", "must be ≥ 2"),
    (f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature", "got 0", "must be > 0"),
    (f"{ROLLOUT}.temperature=1e-8", f"{ROLLOUT}.temperature", "got 1e-08", "must be ≥ 0.01"),
    (
        f"{ROLLOUT}.val_kwargs.temperature=1e-9",
        f"{ROLLOUT}.val_kwargs.temperature",
        "1e-09",
        "must be 0, which is greedy",
    ),
    (f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_p", "got 0.9", "must be 1"),
    (f"{ROLLOUT}.top_k=5", f"{ROLLOUT}.top_k", "truncated", "must be null"),
    (f"{ROLLOUT}.max_model_len=10", f"{ROLLOUT}.max_model_len", "8 + 8 = 16, got 10", "must be ≥"),
    (f"{ACTOR}.ppo_max_token_len_per_gpu=15", f"{ACTOR}.ppo_max_token_len_per_gpu", "got 15", "must be ≥"),
    (f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size", "no shards", "must be 1"),
    ("deterministic=true actor_rollout_ref.rollout.name=vllm", "deterministic", "got vllm", f"{ROLLOUT}.name=torch"),
    (f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.enforce_eager", "option of other engines", "leave it out"),
    (f"{ROLLOUT}.engine_kwargs.x=1", f"{ROLLOUT}.engine_kwargs.x", "option of other engines", "leave it out"),
    (f"{ROLLOUT}.logprob_diff_limit=0", f"{ROLLOUT}.logprob_diff_limit", "got 0", "must be > 0"),
    ("reward.name=null", "reward.name", "is not set", "custom_reward_function.path"),
    ("reward.limit_s=1000", "reward.limit_s", "1000 > 300", f"must be ≤ {ROLLOUT}.agent.sample_limit_s"),
    ("trainer.test_freq=5", "trainer.test_freq", "nothing to validate on", "data.val_files"),
    ("trainer.logger=[jsonl, jsonl]", "trainer.logger", "more than once", "name each once"),
    (
        f"{ACTOR}.optim.lr_warmup_steps=9 trainer.total_training_steps=8",
        f"{ACTOR}.optim.lr_warmup_steps",
        "9 > 8",
        "must be ≤ trainer.total_training_steps",
    ),
    (f"{ACTOR}.optim.lr_warmup_steps=3", f"{ACTOR}.optim.lr_warmup_steps", "3 > 2", "must be ≤ the number of steps"),
    ("data.train_batch_size=64", "data.train_batch_size", "1 * 32 // 64 = 0", "add data or epochs"),
    ("async_training.max_staleness=2", "async_training.max_staleness", "staleness 0", "trainer.mode=fully_async"),
    (f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.n_gpus_per_node", "share the trainer's devices", "leave it out"),
    (
        "trainer.mode=fully_async async_training.max_staleness=0 async_training.sync_every=3",
        "async_training",
        "sync_every",
        "max_staleness",
    ),
    (
        f"{ROLLOUT}.checkpoint_engine.min_healthy=2",
        f"{ROLLOUT}.checkpoint_engine.min_healthy",
        "1 replicas",
        "lower it",
    ),
    ("trainer.n_gpus_per_node=64", "trainer.n_gpus_per_node", "wanted 64 to train", "lower it"),
    ("trainer.device_memory_gb=1e-6", MODEL, "does not fit", "trainer.n_gpus_per_node"),
    ("data.max_response_length=100", "data.max_response_length", "100 + 8 = 108", "lower it"),
    (f"{ROLLOUT}.max_model_len=65", f"{ROLLOUT}.max_model_len", "64 positions", "lower it"),
    ("data.max_prompt_length=1", "data.train_files", "32 of 32 prompts", "data.filter_overlong_prompts=true"),
    ("data.prompt_key=question", "data.train_files", "32 malformed rows of 32", "see data.prompt_key"),
    ("data.train_files=[nowhere.jsonl]", "data.train_files", "no such file: nowhere.jsonl", ""),
    ("data.val_files=[nowhere.jsonl]", "data.val_files", "no such file: nowhere.jsonl", ""),
    (f"{MODEL}=nowhere", MODEL, "no Hugging Face folder", "config.json"),
    ("runtime=rya", "runtime", "no runtime is called 'rya'", "available"),
    ("runtime_options.thread=true", "runtime_options.thread", "unknown option", ""),
    ("trainer.mode=synk", "trainer.mode", "no trainer mode is called 'synk'", "nearest: 'sync'"),
    ("algorithm.adv_estimator=grop", "algorithm.adv_estimator", "'grop'", "nearest: 'grpo'"),
    (f"{ACTOR}.policy_loss.loss_mode=ppo_clp", f"{ACTOR}.policy_loss.loss_mode", "'ppo_clp'", "nearest: 'ppo_clip'"),
    ("trainer.logger=[jsnl]", "trainer.logger", "'jsnl'", "nearest: 'jsonl'"),
    ("reward.name=cpoy", "reward.name", "'cpoy'", "nearest: 'copy'"),
    ("reward.name=fractions.Fraction", "reward.name", "does not meet the contract", "score: missing"),
    ("reward.options.strict=true", "reward.options.strict", "unknown option", "CopyReward takes none"),
    (
        f"{ROLLOUT}.llm_server_manager_class=no_module.X",
        f"{ROLLOUT}.llm_server_manager_class",
        "no module 'no_module'",
        "",
    ),
    (
        f"{ROLLOUT}.checkpoint_manager_class=fakes.Nope",
        f"{ROLLOUT}.checkpoint_manager_class",
        "no attribute 'Nope'",
        "",
    ),
    (
        f"{ROLLOUT}.agent.default_agent_loop=cli_cases.STANDINS",
        f"{ROLLOUT}.agent.default_agent_loop",
        "not a class",
        "",
    ),
    (
        f"{ROLLOUT}.agent.agent_loop_options.max_turns=3",
        f"{ROLLOUT}.agent.agent_loop_options.max_turns",
        "unknown option",
        "SilentLoop takes none",
    ),
    ("prepare=nonsense", "prepare", "'nonsense'", "must be package.module:function"),
    ("prepare=json:prepare", "prepare", "no function 'prepare' in json", ""),
]


@pytest.mark.parametrize(("overrides", "key", "words", "fix"), VALUES, ids=[row[0] for row in VALUES])
def test_a_wrong_value_is_refused_by_its_key_with_the_fix(
    world: Path, overrides: str, key: str, words: str, fix: str
) -> None:
    changes = [overrides] if overrides.count("=") == 1 or "[" in overrides else overrides.split(" ")
    found = problems(world, *changes)
    assert len(found) == 1, found
    (line,) = found
    assert line.startswith("error: ")
    assert f"{key}: " in line
    assert words in line
    assert fix in line


def test_a_gpu_that_is_not_there_is_refused(world: Path) -> None:
    import torch

    if torch.cuda.is_available():
        found = problems(world, "trainer.device=cuda", f"trainer.n_gpus_per_node={2**7}")
        assert "wanted 128 to train" in found[0]
    else:
        (line,) = problems(world, "trainer.device=cuda")
        assert "trainer.device: is cuda, and this machine has no GPU" in line
        assert "trainer.device=cpu" in line


# ---- files: what a folder or a file holds


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).write_text(text)].clear()


def config_with(**changes: object) -> Callable[[Path], None]:
    merged: Mapping[str, object] = {**TINY, **changes}
    return rewrite("config.json", json.dumps({key: value for key, value in merged.items() if value is not None}))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


FOLDERS: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("cut weights", lambda folder: cut(folder / "model.safetensors"), "damaged or cut off", "copy it again"),
    ("no weights", lambda folder: (folder / "model.safetensors").unlink(), "holds no weights", "copy them into it"),
    (
        "a missing shard",
        rewrite("model.safetensors.index.json", '{"weight_map": {"a": "model-2.safetensors"}}'),
        "lacks model-2.safetensors",
        "copy it again",
    ),
    ("config is no JSON", rewrite("config.json", "{"), "cannot be read as JSON", "copy it again"),
    ("config is a list", rewrite("config.json", "[]"), "must hold an object", "copy it again"),
    ("unknown type", config_with(model_type="qwen99"), "'qwen99'", "install a transformers that knows it"),
    ("no type", config_with(model_type=None, architectures=None), "model_type", "install a transformers"),
    (
        "no language model",
        config_with(model_type="vit", architectures=["ViTModel"]),
        "no causal language model",
        "generates text",
    ),
    (
        "generation config is no JSON",
        rewrite("generation_config.json", "{..."),
        "cannot be read as JSON",
        "copy it again",
    ),
    (
        "generation config has a wrong stop",
        rewrite("generation_config.json", '{"eos_token_id": "x"}'),
        "eos_token_id",
        "a token id",
    ),
    ("no tokenizer", no_tokenizer, "no usable tokenizer", "copy tokenizer.json"),
    ("broken tokenizer", rewrite("tokenizer.json", "{}"), "no usable tokenizer", "copy tokenizer.json"),
]


@pytest.mark.parametrize(("change", "words", "fix"), [row[1:] for row in FOLDERS], ids=[row[0] for row in FOLDERS])
def test_a_broken_model_folder_is_one_line_with_the_fix(
    world: Path, tmp_path: Path, change: Callable[[Path], None], words: str, fix: str
) -> None:
    folder = write_model_folder(tmp_path / "model", TINY)
    change(folder)
    found = problems(world, f"{MODEL}={folder}")
    assert len(found) == 1, found
    assert f"{MODEL}: " in found[0]
    assert words in found[0]
    assert fix in found[0]
    assert "\n" not in found[0]


def test_a_model_without_an_end_is_refused(world: Path, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", {k: v for k, v in TINY.items() if k != "eos_token_id"})
    (folder / "tokenizer_config.json").write_text("{}")
    (line,) = problems(world, f"{MODEL}={folder}")
    assert f"{MODEL}: the model in {folder} names no end-of-sequence token" in line
    assert "set eos_token in its tokenizer_config.json" in line


CHAT = {"prompt": [{"role": "user", "content": "a"}]}
DATA: list[tuple[str, object, str, str, str]] = [
    ("not JSON", [*ROWS, "{"], "data.train_files", "1 malformed rows of 33", "correct or remove them"),
    ("no object", [*ROWS, "[1]", "2"], "data.train_files", "2 malformed rows of 34", "correct or remove them"),
    ("no file of rows", [], "data.train_files", "no usable row", ""),
    (
        "NaN",
        [*ROWS, '{"prompt": "a", "reward_model": {"ground_truth": NaN}}'],
        "data.train_files",
        "holds NaN",
        "write null",
    ),
    (
        "half a character",
        [*ROWS, {"prompt": "\ud800"}],
        "data.train_files",
        "a lone surrogate",
        "correct or remove them",
    ),
    (
        "nesting",
        [*ROWS, '{"prompt": "a", "x": ' + "[" * 10_000 + "]" * 10_000 + "}"],
        "data.train_files",
        "nested deeper",
        "",
    ),
    ("no chat template", [CHAT] * 32, MODEL, "has no chat template", "put a chat_template.jinja into that folder"),
    (
        "too long",
        [*ROWS, {"prompt": "a " * 20}],
        "data.train_files",
        "1 of 33 prompts are longer",
        "the longest has 20 tokens",
    ),
]


@pytest.mark.parametrize(("rows", "key", "words", "fix"), [row[1:] for row in DATA], ids=[row[0] for row in DATA])
def test_wrong_data_are_refused_with_counts(
    world: Path, tmp_path: Path, rows: object, key: str, words: str, fix: str
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    found = problems(world, f"data.train_files=[{file}]")
    assert len(found) == 1, found
    assert f"{key}: " in found[0]
    assert words in found[0]
    assert fix in found[0]


FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
REWARDS: list[tuple[str, str | None, str, str]] = [
    ("no file", None, "no such file", ""),
    ("no function", "def score(): pass\n", "no function 'compute_score'", "functions there: score"),
    ("not Python", "def compute_score(:\n", "SyntaxError", "reward.py:1"),
    ("raises", "raise RuntimeError('no key')\n" + FUNCTION, "RuntimeError: no key", "reward.py:1"),
    ("exits", "import sys\nsys.exit(3)\n", "SystemExit: 3", "reward.py:2"),
    ("dies", "import os\nos._exit(7)\n", "ended the process (exit code 7)", ""),
    ("hangs", "import time\ntime.sleep(3600)\n", "reward.start_limit_s=1 s", "raise the limit"),
    ("import missing", "import no_such_module\n" + FUNCTION, "no_such_module", "reward.py:1"),
    ("wrong parameters", "def compute_score(answer, truth):\n    return 1.0\n", "takes (answer, truth)", "write def"),
]


@pytest.mark.parametrize(("text", "words", "fix"), [row[1:] for row in REWARDS], ids=[row[0] for row in REWARDS])
def test_a_reward_file_that_cannot_be_used_is_refused(
    world: Path, tmp_path: Path, text: str | None, words: str, fix: str
) -> None:
    file = tmp_path / "reward.py"
    if text is not None:
        file.write_text(text)
    limit = 1 if text is not None and "sleep" in text else 30
    own = ["reward.name=null", f"reward.custom_reward_function.path={file}", f"reward.start_limit_s={limit}"]
    found = problems(world, *own)
    assert len(found) == 1, found
    assert "reward.custom_reward_function" in found[0]
    assert words in found[0]
    assert fix in found[0]


def test_mistakes_of_every_kind_are_shown_together(world: Path) -> None:
    found = problems(
        world,
        "reward.nmae=copy",
        f"{ACTOR}.grad_clip=0",
        f"{ROLLOUT}.agent.agent_loop_options.x=1",
        "trainer.n_gpus_per_node=64",
        "data.val_files=[nowhere.jsonl]",
        "data.prompt_key=question",
        f"{ROLLOUT}.max_model_len=65",
    )
    assert len(found) == 7, found


# ---- the real command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reward.nmae=copy"], "did you mean reward.name?"),
        (["run_dir=x"], "write --out DIR"),
        (["data.train_files=[nowhere.jsonl]"], "no such file"),
        (["data.seed"], "must be key=value"),
        (["reward.name=null", "reward.custom_reward_function.path=HANGS", "reward.start_limit_s=1"], "start_limit_s"),
    ],
)
@pytest.mark.parametrize("command", ["check", "run"])
def test_the_command_refuses_with_exit_code_2(
    world: Path, tmp_path: Path, command: str, arguments: list[str], words: str
) -> None:
    (tmp_path / "recipe.yaml").write_text("trainer: {mode: sync}\n")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(3600)\n")
    given = [text.replace("HANGS", str(tmp_path / "hangs.py")) for text in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "verl_trainers.cli", command, "recipe.yaml", "--out", "out", *right(world), *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "\033" not in done.stderr
    assert not (tmp_path / "out").exists()
