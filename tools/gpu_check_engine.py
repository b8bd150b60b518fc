"""Holds the embedded engine to transformers on one machine: needs this repository, torch and transformers, and a GPU.

Four checks: greedy tokens in float32 equal those of `generate` up to near-ties; log-probs in bfloat16 agree with the
model's own; tokens per second beside those of `generate`; memory goes back to the device in sleep, and what is
generated after waking equals what was before. Exits with 1 if one fails. Nothing is downloaded: without `--model` a
model of the Qwen2 family with random weights is used, and nothing but the packages' sources is imported.

    python tools/gpu_check_engine.py [--device cuda|cpu] [--model FOLDER] [--width N] [--tokens N] [--only NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "contracts" / "src"), str(ROOT / "packages" / "verl-rollout" / "src")]

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config  # noqa: E402

from verl_contracts.clock import Deadline, SystemClock  # noqa: E402
from verl_contracts.rollout import RolloutSettings  # noqa: E402
from verl_contracts.tokens import Completion, GenerationRequest, SampleKey, SamplingParams  # noqa: E402
from verl_contracts.weights import TensorMeta  # noqa: E402
from verl_rollout.engine.torch.engine import TorchEngine  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

Dtype = Literal["float32", "bfloat16"]
Prompts = list[tuple[int, ...]]

CLOCK = SystemClock()
LIMIT_S = 300.0
PROMPT = 24
NEAR_TIE = 1e-3
"""Logits closer than this may be ranked either way."""
MEAN_APART = 0.1
"""Most mean absolute difference of log-probs in bfloat16; two right implementations differ by about 0.04."""
FREED = 0.9
"""Least share of parameters and cache that sleep must give back."""
SLOWEST = 0.95
"""Least tokens per second, as a share of what `generate` makes."""
SIZES = {"cpu": (256, 4), "cuda": (1024, 12)}
"""Hidden size and layers of the model with random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the checks run on."""

    folder: Path
    device: Literal["cpu", "cuda"]
    width: int
    tokens: int
    pairs: int

    def model(self, dtype: Dtype) -> PreTrainedModel:
        """Return the reference on the device."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, dtype))
        model.requires_grad_(False).train(mode=False)
        torch.nn.Module.to(model, self.device)
        return model

    def prompts(self, vocab: int) -> Prompts:
        """Return one prompt for each sequence, of one length, the same in every run."""
        draw = random.Random(1)
        return [tuple(draw.randrange(vocab) for _ in range(PROMPT)) for _ in range(self.width)]

    @asynccontextmanager
    async def engine(self, model: PreTrainedModel, dtype: Dtype) -> AsyncIterator[TorchEngine]:
        """Yield an engine that serves the weights of `model`."""
        settings = RolloutSettings(
            model_path=str(self.folder),
            dtype=dtype,
            device=self.device,
            max_num_seqs=self.width,
            max_model_len=PROMPT + self.tokens,
        )
        engine = TorchEngine.create(settings, replica_id="engine", rank=0, clock=CLOCK)
        try:
            await engine.pause("abort", deadline=soon())
            await load(engine, model, 1)
            yield engine
        finally:
            await engine.close()

    async def ask(self, engine: TorchEngine, prompts: Prompts, *, temperature: float) -> list[Completion]:
        """Generate for all prompts at once."""
        answers = await asyncio.gather(
            *(
                engine.generate(
                    GenerationRequest(
                        request_id=str(i),
                        prompt_ids=prompt,
                        sampling=SamplingParams(max_tokens=self.tokens, temperature=temperature),
                        key=SampleKey(uid="0-0-0", sample=i, turn=0),
                    ),
                    deadline=soon(),
                )
                for i, prompt in enumerate(prompts)
            )
        )
        return [answer for answer in answers if isinstance(answer, Completion)]

    def generate(self, model: PreTrainedModel, prompts: Prompts, *, sample: bool) -> list[list[int]]:
        """Return what `generate` makes of all prompts in one batch."""
        ids = torch.tensor(prompts, device=self.device)
        options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
        with torch.inference_mode():
            output = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.tokens,
                do_sample=sample,
                use_cache=True,
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )
        made: list[list[int]] = output[:, PROMPT:].tolist()
        return made

    def logits(self, model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        """Return the model's own logits for each of `ids` after `prompt`, [ids, vocabulary] float32."""
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([[*prompt, *ids]], device=self.device))
        logits: torch.Tensor = output.logits[0, len(prompt) - 1 : -1]
        return logits.float()


def soon() -> Deadline:
    """Return the limit of one call."""
    return Deadline.after(CLOCK, LIMIT_S)


async def load(engine: TorchEngine, model: PreTrainedModel, version: int) -> None:
    """Make a paused engine serve `model` as `version`."""
    engine.begin_update()
    engine.target().load(
        (TensorMeta(name=name, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch.")), value)
        for name, value in model.named_parameters()
    )
    await engine.commit(version, keep_cache=False)
    await engine.resume()


async def check_greedy(bench: Bench) -> tuple[bool, str]:
    """Compare greedy tokens in float32, up to the first near-tie of each sequence."""
    model = bench.model("float32")
    prompts = bench.prompts(model.config.vocab_size)
    wanted = bench.generate(model, prompts, sample=False)
    async with bench.engine(model, "float32") as engine:
        answers = await bench.ask(engine, prompts, temperature=0.0)
    equal = ties = 0
    wrong: list[str] = []
    for row, (prompt, ids, answer) in enumerate(zip(prompts, wanted, answers, strict=True)):
        at = next((i for i, pair in enumerate(zip(ids, answer.token_ids, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            equal += 1
            continue
        logits = bench.logits(model, prompt, ids)[at]
        gap = abs(float(logits[ids[at]] - logits[answer.token_ids[at]]))
        if gap < NEAR_TIE:
            ties += 1
        else:
            wrong.append(f"row {row} differs at token {at} where logits are {gap:.2g} apart")
    return not wrong, f"{equal} of {len(prompts)} equal, {ties} up to a near-tie; {'; '.join(wrong) or 'none wrong'}"


async def check_logprobs(bench: Bench) -> tuple[bool, str]:
    """Compare the log-probs of sampled tokens in bfloat16 with a full pass of the model, which is in bfloat16 too."""
    model = bench.model("bfloat16")
    prompts = bench.prompts(model.config.vocab_size)
    async with bench.engine(model, "bfloat16") as engine:
        answers = await bench.ask(engine, prompts, temperature=1.0)
    apart: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        own = bench.logits(model, prompt, answer.token_ids).log_softmax(dim=-1).cpu()
        chosen = own.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        apart += (chosen - torch.tensor(answer.logprobs)).abs().tolist()
    mean = statistics.fmean(apart)
    return mean < MEAN_APART, f"mean |difference| {mean:.4f}, largest {max(apart):.3f}, over {len(apart)} tokens"


async def check_speed(bench: Bench) -> tuple[bool, str]:
    """Compare tokens per second at equal lengths, in alternating pairs; the first pair warms up."""
    dtype: Dtype = "bfloat16" if bench.device == "cuda" else "float32"
    model = bench.model(dtype)
    prompts = bench.prompts(model.config.vocab_size)
    ours: list[float] = []
    theirs: list[float] = []
    async with bench.engine(model, dtype) as engine:
        for _ in range(bench.pairs + 1):
            begun = time.perf_counter()
            await bench.ask(engine, prompts, temperature=1.0)
            between = time.perf_counter()
            bench.generate(model, prompts, sample=True)  # ends with a copy to the host
            ours.append(between - begun)
            theirs.append(time.perf_counter() - between)
    ratio = statistics.median(other / own for own, other in zip(ours[1:], theirs[1:], strict=True))
    rates = [bench.width * bench.tokens / statistics.median(times[1:]) for times in (ours, theirs)]
    return ratio >= SLOWEST, f"{rates[0]:.0f} tok/s, generate {rates[1]:.0f} tok/s, ratio {ratio:.2f} ({dtype})"


async def check_sleep(bench: Bench) -> tuple[bool, str]:
    """Measure memory before, during and after sleep, and compare what is generated before and after."""
    model = bench.model("float32")
    prompts = bench.prompts(model.config.vocab_size)
    async with bench.engine(model, "float32") as engine:
        before = await bench.ask(engine, prompts, temperature=0.0)
        held = sum(parameter.nbytes for parameter in model.parameters())
        awake = used_bytes(bench.device)
        await engine.pause("wait", deadline=soon())
        await engine.sleep()
        asleep = used_bytes(bench.device)
        await engine.wake()
        await load(engine, model, 2)
        after = await bench.ask(engine, prompts, temperature=0.0)
        again = used_bytes(bench.device)
    same = [a.token_ids for a in before] == [a.token_ids for a in after]
    freed = awake - asleep
    figures = ", ".join(
        f"{name} {value / 2**20:.0f} MiB" for name, value in (("awake", awake), ("asleep", asleep), ("again", again))
    )
    text = f"{figures}; parameters {held / 2**20:.0f} MiB; tokens {'equal' if same else 'differ'} after waking"
    return same and freed >= FREED * held, text


def used_bytes(device: str) -> int:
    """Return what this process holds of the device's memory, as the device sees it."""
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


CHECKS: dict[str, Callable[[Bench], Coroutine[None, None, tuple[bool, str]]]] = {
    "greedy": check_greedy,
    "logprobs": check_logprobs,
    "speed": check_speed,
    "sleep": check_sleep,
}


def main() -> int:
    """Run the checks and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="folder of a model; without it one with random weights is made")
    parser.add_argument("--width", type=int, default=32, help="sequences at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each")
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs of the speed check")
    parser.add_argument("--only", choices=CHECKS, action="append", help="names of checks to run")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here; run with --device cpu", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name() if options.device == 'cuda' else 'cpu'}, torch {torch.__version__}")
    failed = False
    with tempfile.TemporaryDirectory() as made:
        if options.model is None:
            write_model(Path(made), *SIZES[options.device])
        bench = Bench(
            folder=options.model or Path(made),
            device=options.device,
            width=options.width,
            tokens=options.tokens,
            pairs=options.pairs,
        )
        for name in options.only or CHECKS:
            passed, text = asyncio.run(CHECKS[name](bench))
            print(f"{'ok  ' if passed else 'FAIL'} {name:9} {text}", flush=True)
            failed |= not passed
    return int(failed)


def write_model(folder: Path, hidden: int, layers: int) -> None:
    """Write a model with random weights, sharp enough that its tokens differ."""
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
