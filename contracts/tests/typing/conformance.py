"""What an implementation must not do. Each is refused where it is written, in the form that names the member."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_contracts.clock import Deadline
    from verl_contracts.events import EventSink, JsonValue
    from verl_contracts.failures import FailureRecord, FailureSink
    from verl_contracts.rewards import RewardFunction, RewardRequest, RewardResult
    from verl_contracts.rollout import LLMClient, SupportsSleep
    from verl_contracts.runtime import Runtime
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest


class GoodClient:
    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        raise TimeoutError


class NarrowClient:
    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion:
        raise TimeoutError


class WrongKeyword:
    async def generate(self, request: GenerationRequest, /, *, timeout: Deadline) -> Completion | AbortedCompletion:
        raise TimeoutError


class SyncForAsync:
    def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        raise TimeoutError


class ExtraRequired:
    async def generate(
        self, request: GenerationRequest, /, *, deadline: Deadline, replica: str
    ) -> Completion | AbortedCompletion:
        raise TimeoutError


class ExtraOptional:
    async def generate(
        self, request: GenerationRequest, /, *, deadline: Deadline, replica: str | None = None
    ) -> Completion | AbortedCompletion:
        raise TimeoutError


class MissingMember:
    async def sleep(self, *, deadline: Deadline) -> None:
        raise TimeoutError


class AsyncForSync:
    async def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        raise TimeoutError


class OwnKindOfRecord:
    def report(self, record: str, /) -> None:
        raise TimeoutError


class NarrowerArgument:
    def emit(self, name: str, fields: dict[str, JsonValue], /) -> None:
        raise TimeoutError


def _good(x: GoodClient) -> LLMClient:
    return x


def _narrow(x: NarrowClient) -> LLMClient:
    return x


def _wrong_keyword(x: WrongKeyword) -> LLMClient:
    return x  # E: return-value


def _sync_for_async(x: SyncForAsync) -> LLMClient:
    return x  # E: return-value


def _extra_required(x: ExtraRequired) -> LLMClient:
    return x  # E: return-value


def _extra_optional(x: ExtraOptional) -> LLMClient:
    return x


def _missing_member(x: MissingMember) -> SupportsSleep:
    return x  # E: return-value


def _async_for_sync(x: AsyncForSync) -> RewardFunction:
    return x  # E: return-value


def _own_kind_of_record(x: OwnKindOfRecord) -> FailureSink:
    return x  # E: return-value


def _narrower_argument(x: NarrowerArgument) -> EventSink:
    return x  # E: return-value


class CoroutineOfStream:
    async def watch(self) -> AsyncIterator[FailureRecord]:
        raise TimeoutError


async def an_async_stream_is_declared_without_async(runtime: Runtime, wrong: CoroutineOfStream) -> None:
    async for _ in runtime.watch():
        return
    async for _ in wrong.watch():  # E: attr-defined
        return
