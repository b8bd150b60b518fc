"""Parts of a run: which may be asked for, what a saved group must be, and the loop without replicas or updates."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from config_cases import GOOD, mistakes_of
from fakes import FakeAgents, FakeCheckpoint, FakeData, FakeServers, FakeWorkers, World
from hypothesis import given
from hypothesis import strategies as st

from verl_contracts.clock import Clock, Deadline
from verl_contracts.errors import ConfigError, DataError
from verl_contracts.runtime import PayloadRef
from verl_contracts.samples import FAILED, GroupRequest, GroupUid, Trajectory
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.testing.virtual import VirtualClock, run_virtual
from verl_contracts.tokens import SAMPLED, SamplingParams, VersionSpan
from verl_contracts.training import Schedule, StepContext, TrainBatch, TrainRow
from verl_trainers.config.check import check_files
from verl_trainers.config.load import load_config
from verl_trainers.core.admission import BoundedAdmission
from verl_trainers.core.loop import LoopLimits, LoopParts, LoopReport, TrainingLoop
from verl_trainers.core.producer import GroupPlayer, GroupRules
from verl_trainers.core.store import GroupStore
from verl_trainers.core.validation import Validator
from verl_trainers.partial.replay import SavedGroups, count_saved_steps
from verl_trainers.partial.rollout_file import RolloutHead, RolloutLimits, limits_of, read_rollouts, weights_fingerprint
from verl_trainers.partial.saving import RolloutSaver

HEAD = RolloutHead(weights="abc", n=2, temperature=1.0, top_p=1.0, top_k=None)
LIMITS = RolloutLimits(n=2, max_tokens=6, vocab_size=12, allow_fewer=False)
UNITS = SamplingParams(max_tokens=4)


def trajectory(*, ids: Sequence[int] = (1, 2, 3), logprob: float = -0.1, version: int = 0) -> Trajectory:
    size = len(ids)
    return Trajectory(
        ids=tuple(ids),
        loss_mask=(0, *(1,) * (size - 1)),
        logprobs=(0.0, *(logprob,) * (size - 1)),
        spans=(VersionSpan(version=version, kv_version=version, start=1, end=size),),
        logprob_kind=SAMPLED,
        prompt_length=1,
    )


def batch(uids: Sequence[str], *, part: Trajectory | None = None, n: int = 2, score: float = 0.5) -> TrainBatch:
    rows = tuple(
        TrainRow(
            uid=uid,
            sample=index,
            score=score,
            payload=PayloadRef(num_bytes=0, value=(part or trajectory(),)),
            num_tokens=3,
            num_trained=2,
        )
        for uid in uids
        for index in range(n)
    )
    return TrainBatch(rows=rows, num_groups=len(uids), expected_rows=len(uids) * 2, allow_fewer=True)


@dataclass
class Inside:
    """Values that travel inside their references."""

    clock: Clock

    async def call(self, actor: object, method: str, arguments: Mapping[str, object], /, *, deadline: Deadline) -> None:
        raise AssertionError("not used")

    async def put(self, value: object, /) -> PayloadRef:
        return PayloadRef(num_bytes=0, value=value)

    async def get(self, ref: PayloadRef, /, *, deadline: Deadline) -> object:
        return ref.value


def save(path: Path, *batches: TrainBatch, finish: bool = True) -> Path:
    """Write batches as a run does that only generates."""

    async def write() -> None:
        clock = virtual()
        world = World(clock=clock, rng=random.Random(0), sample_s=lambda rng: 1.0, step_s=lambda rng: 1.0)
        saver = RolloutSaver(FakeWorkers(world), path=path, head=HEAD, caller=Inside(clock))
        for step, rows in enumerate(batches, start=1):
            result = await saver.update(rows, StepContext(step=step, total_steps=9), deadline=Deadline.after(clock, 10))
            assert (result.version, result.updates, result.rows) == (step, 0, len(rows.rows))
        if finish:
            saver.finish()

    run_virtual(write())
    return path


def virtual() -> VirtualClock:
    return VirtualClock(asyncio.get_running_loop())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("trainer.val_only=true",), "data.val_files is empty: name held-out files"),
        (("trainer.val_only=true", "trainer.rollout_only=true", "data.val_files=[a]"), "are both set: choose one"),
        (("trainer.rollout_only=true", "data.rollout_files=[a]"), "are both set: choose one"),
        (
            ("trainer.rollout_only=true", "trainer.test_freq=5", "data.val_files=[a]"),
            "must be -1 for trainer.rollout_only",
        ),
        (("data.rollout_files=[a]", "data.val_files=[b]"), "must be [] with data.rollout_files"),
        (("data.rollout_files=[a]", "trainer.total_epochs=2"), "a saved group is trained on once"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(overrides: tuple[str, ...], words: str) -> None:
    assert sum(words in line for line in mistakes_of(*overrides)) == 1


def test_what_a_part_does_not_read_need_not_be_given() -> None:
    assert mistakes_of("data.train_files=[]", "reward.name=null", "data.rollout_files=[a]") == []
    assert mistakes_of("data.train_files=[]", "data.val_files=[a]", "trainer.val_only=true") == []
    assert mistakes_of("data.train_files=[]", "trainer.rollout_only=true") != []


def test_only_the_files_that_a_part_reads_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = f"actor_rollout_ref.model.path={tmp_path}"
    trained = load_config(None, [*GOOD, model, "data.rollout_files=[gone.jsonl]"])
    assert [str(mistake) for mistake in check_files(trained)] == ["data.rollout_files: no such file: gone.jsonl"]
    whole = load_config(None, [*GOOD, model])
    assert [str(mistake) for mistake in check_files(whole)] == ["data.train_files: no such file: train.jsonl"]


@pytest.mark.parametrize(
    ("text", "size"),
    [('{"vocab_size": 12}', 12), ('{"text_config": {"vocab_size": 7}}', 7), ("{}", None), ("[]", None), (None, None)],
)
def test_the_size_of_the_vocabulary_comes_from_the_model(text: str | None, size: int | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    config = load_config(None, [*GOOD, f"actor_rollout_ref.model.path={tmp_path}"])
    if size is None:
        with pytest.raises(DataError, match=r"actor_rollout_ref\.model\.path: .*config\.json does not say vocab_size"):
            limits_of(config)
    else:
        assert limits_of(config).vocab_size == size


@given(
    logprob=st.floats(max_value=0, allow_nan=False, allow_infinity=False),
    ids=st.lists(st.integers(0, 11), min_size=2, max_size=6),
)
def test_tokens_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, logprob: float, ids: list[int]) -> None:
    part = trajectory(ids=ids, logprob=logprob)
    file = save(tmp_path_factory.mktemp("saved") / "rollouts.jsonl", batch(["0-3-0"], part=part, score=1 / 3))
    (group,) = read_rollouts(str(file), head=HEAD, limits=LIMITS)
    assert group.uid == GroupUid(epoch=0, row=3)
    assert [sample.score for sample in group.samples] == [1 / 3, 1 / 3]
    for sample in group.samples:
        assert sample.payload is not None
        assert sample.payload.value == (part,)
        assert repr(sample.payload.value) == repr((part,))
        assert (sample.num_tokens, sample.num_trained, sample.versions) == (len(ids), len(ids) - 1, (0, 0))


def test_a_file_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    path = save(tmp_path / "rollouts.jsonl", batch(["0-1-0"]), finish=False)
    assert not path.exists()
    save(path, batch(["0-1-0", "0-2-0"]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["rollouts.jsonl"]
    lines = path.read_text().splitlines()
    for kept in (lines[:-1], lines[:2], [lines[0], *lines[2:]], lines[:1]):
        path.write_text("\n".join(kept))
        with pytest.raises(DataError, match="is cut"):
            read_rollouts(str(path), head=HEAD, limits=LIMITS)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (
            replace(HEAD, weights="other"),
            "weights in actor_rollout_ref.model.path: 'abc' when they were sampled, 'other'",
        ),
        (replace(HEAD, temperature=0.7), "actor_rollout_ref.rollout.temperature: 1.0 when they were sampled, 0.7 now"),
        (replace(HEAD, n=4), "actor_rollout_ref.rollout.n: 2 when they were sampled, 4 now"),
        (replace(HEAD, top_p=0.9), "actor_rollout_ref.rollout.top_p"),
        (replace(HEAD, top_k=5), "actor_rollout_ref.rollout.top_k: None"),
    ],
)
def test_samples_that_were_made_otherwise_are_refused(tmp_path: Path, head: RolloutHead, words: str) -> None:
    file = save(tmp_path / "rollouts.jsonl", batch(["0-1-0"]))
    with pytest.raises(DataError) as error:
        read_rollouts(str(file), head=head, limits=LIMITS)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("part", "limits", "words"),
    [
        (trajectory(version=3), LIMITS, "another version than 0"),
        (trajectory(ids=(1, 12)), LIMITS, "token ids 1..12, and the model has 0..11"),
        (trajectory(ids=range(7)), LIMITS, "7 tokens, and data.max_prompt_length"),
        (replace(trajectory(), loss_mask=(0, 0, 0)), LIMITS, "no token that the policy sampled"),
        (trajectory(), replace(LIMITS, n=3), "2 of 3 samples have a score; reward.unusable=train_rest"),
    ],
    ids=["version", "vocabulary", "length", "mask", "fewer"],
)
def test_a_group_that_cannot_be_trained_on_is_refused(
    tmp_path: Path, part: Trajectory, limits: RolloutLimits, words: str
) -> None:
    file = save(tmp_path / "rollouts.jsonl", batch(["0-1-0"], part=part))
    with pytest.raises(DataError, match=r"rollouts\.jsonl:2 cannot be trained on") as error:
        read_rollouts(str(file), head=HEAD, limits=limits)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"score": 0.5', '"score": null'),
        ('"score": 0.5', '"score": NaN'),
        ('"loss_mask": [0, 1, 1]', '"loss_mask": [0, 1]'),
        ('"ids": [1, 2, 3]', '"ids": [1, 2, "3"]'),
        ('"spans": [[0, 0, 1, 3]]', '"spans": [[0, 0, 1]]'),
        ('"index": 1', '"index": 0'),
        ('"index": 1', '"index": 7'),
        ('"trajectories"', '"trajectory"'),
        ('"0-1-0"', '"row one"'),
        ('"logprobs": [0.0, -0.1, -0.1]', '"logprobs": null'),
        ('{"uid"', '["uid"'),
    ],
)
def test_a_line_that_was_changed_by_hand_is_one_clear_error(tmp_path: Path, old: str, new: str) -> None:
    file = save(tmp_path / "rollouts.jsonl", batch(["0-1-0"]))
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=r"rollouts\.jsonl:2"):
        read_rollouts(str(file), head=HEAD, limits=LIMITS)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    for text, words in (
        ("", "is empty"),
        ('{"prompt": "1 + 1"}\n', "was not written by trainer.rollout_only"),
        ("x\n", "is not a JSON object"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=words):
            read_rollouts(str(file), head=HEAD, limits=LIMITS)
    with pytest.raises(DataError, match="cannot be read"):
        read_rollouts(str(tmp_path / "none.jsonl"), head=HEAD, limits=LIMITS)


def test_missing_samples_are_failed_ones_where_the_rest_may_be_trained(tmp_path: Path) -> None:
    file = save(tmp_path / "rollouts.jsonl", batch(["0-1-0"], n=1))
    (group,) = read_rollouts(str(file), head=HEAD, limits=replace(LIMITS, allow_fewer=True))
    assert [sample.outcome for sample in group.samples][1:] == [FAILED]
    assert len(group.scored) == 1


def test_weights_are_told_apart_by_content_and_not_by_name(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abcd"]
    for folder, name, content in zip(folders, "xyxx", (b"1" * 9, b"1" * 9, b"1" * 8 + b"2", b"1" * 10), strict=True):
        folder.mkdir()
        (folder / f"{name}.safetensors").write_bytes(content)
        (folder / "config.json").write_text(json.dumps({"from": folder.name}))
    same, renamed, changed, longer = (weights_fingerprint(folder) for folder in folders)
    assert same == renamed
    assert len({same, changed, longer}) == 3


@pytest.mark.parametrize(
    ("asked", "groups", "bound", "steps", "words"),
    [
        ("null", 9, 1, 2, "1 groups are left out"),
        ("1", 8, 0, 1, "4 groups are left out"),
        ("2", 7, 1, None, "7 // 4 = 1 steps, and trainer.total_training_steps is 2"),
        ("null", 3, 0, None, "3 // 4 = 0 steps"),
        ("null", 12, 1, None, "staleness 3 - 1 - 0 = 2, and trainer.mode=fully_async has the bound 1"),
    ],
)
def test_saved_groups_make_full_steps_within_the_bound(
    asked: str, groups: int, bound: int, steps: int | None, words: str
) -> None:
    config = load_config(None, [*GOOD, "data.train_batch_size=4", f"trainer.total_training_steps={asked}"])
    if steps is None:
        with pytest.raises(ConfigError) as error:
            count_saved_steps(config, groups, max_staleness=bound)
        assert words in str(error.value)
    else:
        count = count_saved_steps(config, groups, max_staleness=bound)
        assert count.steps == steps
        assert words in count.message


def test_a_group_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "rollouts.jsonl", batch(["0-1-0"]), batch(["0-1-1"]))
    with pytest.raises(DataError, match="2 groups of 1 prompts"):
        SavedGroups(read_rollouts(str(file), head=HEAD, limits=LIMITS))


def loop_of(
    clock: VirtualClock, *, steps: int, k: int, trains: bool, saved: SavedGroups | None = None, validate: bool = False
) -> tuple[TrainingLoop, World, FakeCheckpoint]:
    world = World(clock=clock, rng=random.Random(0), sample_s=lambda rng: rng.random(), step_s=lambda rng: 1.0)
    world.updates = int(trains)
    agents, events, checkpoint = FakeAgents(world), RecordingEvents(clock), FakeCheckpoint(world)
    player: GroupPlayer = saved if saved is not None else agents
    prompt = FakeData().next()
    assert prompt is not None
    validator = Validator(
        prompts=(prompt,), agents=agents, n=1, sampling=UNITS, limit_s=10.0, clock=clock, events=events
    )
    loop = TrainingLoop(
        parts=LoopParts(
            admission=BoundedAdmission(
                max_staleness=k, batch_groups=2, total_steps=max(1, steps), most_outstanding=None if trains else 4
            ),
            store=GroupStore(),
            data=saved if saved is not None else FakeData(),
            agents=player,
            servers=None if saved is not None else FakeServers(),
            checkpoint=None if saved is not None else checkpoint,
            workers=FakeWorkers(world),
            clock=clock,
            events=events,
            validator=validator if validate else None,
        ),
        rules=GroupRules(n=2, sampling=UNITS, group_limit_s=100.0),
        schedule=Schedule(max_staleness=k, sync_every=1 if trains else k + 1),
        total_steps=steps,
        batch_groups=2,
        limits=LoopLimits(),
        trains=trains,
    )
    return loop, world, checkpoint


def test_saved_groups_go_through_the_loop_once_each_and_without_replicas(tmp_path: Path) -> None:
    uids = [f"0-{row}-0" for row in (7, 3, 9, 1, 5, 2)]
    file = save(tmp_path / "rollouts.jsonl", *(batch(sorted(uids[i : i + 2])) for i in (0, 2, 4)))
    saved = SavedGroups(read_rollouts(str(file), head=HEAD, limits=LIMITS))

    async def run() -> tuple[LoopReport, list[str]]:
        clock = virtual()
        loop, world, checkpoint = loop_of(clock, steps=3, k=2, trains=True, saved=saved)
        report = await loop.run()
        assert checkpoint.calls == []
        return report, [uid for _, uid, _ in world.trained]

    report, trained = run_virtual(run())
    assert (report.steps, report.updates, report.max_staleness_seen) == (3, 3, 2)
    assert sorted(trained) == sorted(uids)


def test_a_loop_that_only_generates_never_moves_weights_and_bounds_what_is_in_play() -> None:
    async def run() -> tuple[LoopReport, World, FakeCheckpoint]:
        clock = virtual()
        loop, world, checkpoint = loop_of(clock, steps=6, k=6, trains=False, validate=True)
        return await loop.run(), world, checkpoint

    report, world, checkpoint = run_virtual(run())
    assert checkpoint.calls == ["update 0"]
    assert {version for _, _, version in world.trained} == {0}
    assert report.groups_trained == 12
    assert report.max_staleness_seen == 0, "nothing is newer than the first weights"
    assert [row.version for row in report.validations] == [0]


def test_a_loop_of_no_steps_validates_the_first_weights_once() -> None:
    async def run() -> tuple[LoopReport, World, FakeCheckpoint]:
        clock = virtual()
        loop, world, checkpoint = loop_of(clock, steps=0, k=0, trains=False, validate=True)
        return await loop.run(), world, checkpoint

    report, world, checkpoint = run_virtual(run())
    assert (checkpoint.calls, world.trained) == (["update 0"], [])
    assert [row.version for row in report.validations] == [0]


def test_a_saved_group_answers_with_the_uid_that_asked(tmp_path: Path) -> None:
    file = save(tmp_path / "rollouts.jsonl", batch(["0-1-0"]))
    saved = SavedGroups(read_rollouts(str(file), head=HEAD, limits=LIMITS))
    prompt = saved.next()
    assert prompt is not None
    assert (prompt.prompt_ids, saved.next()) == ((1,), None)
    uid = GroupUid(epoch=prompt.epoch, row=prompt.row, attempt=1)

    async def run() -> GroupUid:
        request = GroupRequest(uid=uid, prompt=prompt, n=2, sampling=UNITS)
        return (await saved.run_group(request, deadline=Deadline.after(virtual(), 1))).uid

    assert run_virtual(run()) == uid


def test_the_cursor_of_other_files_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "rollouts.jsonl", batch(["0-1-0", "0-2-0"]))
    groups = read_rollouts(str(file), head=HEAD, limits=LIMITS)
    first, again = SavedGroups(groups), SavedGroups(groups)
    assert first.next() is not None
    again.restore(first.state())
    assert again.next() == first.next()
    with pytest.raises(DataError, match="belongs to other files"):
        SavedGroups(groups[:1]).restore(first.state())
