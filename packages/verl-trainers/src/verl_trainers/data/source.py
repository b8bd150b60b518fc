"""Prompts in an order that depends on seed and epoch only, with a cursor that refuses other data."""

from __future__ import annotations

import hashlib
import logging
import random
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError
from verl_contracts.samples import Message, Prompt
from verl_trainers.data.rows import read_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.events import JsonValue
    from verl_contracts.training import DataSource
    from verl_trainers.config.schema import DataConfig
    from verl_trainers.data.rows import Row
    from verl_trainers.data.tokenizer import PromptTokenizer

__all__ = ["PromptSource"]

_log = logging.getLogger(__name__)
_SHOWN = 5


class PromptSource:
    """Rows of files as tokenized prompts. Everything is read and checked when it is opened."""

    def __init__(
        self, prompts: Sequence[Prompt], *, epochs: int | None, shuffle: bool, seed: int, num_left_out: int = 0
    ) -> None:
        """Serve `prompts` `epochs` times, for ever when None; their own `epoch` is replaced."""
        self._prompts = tuple(prompts)
        self.num_left_out = num_left_out
        """Rows of the files that were too long."""
        self._epochs = epochs
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        digest = hashlib.sha256(repr((seed, shuffle)).encode())
        for prompt in self._prompts:
            digest.update(repr((prompt.row, prompt.prompt_ids)).encode())
        self._fingerprint = digest.hexdigest()[:16]

    @classmethod
    def open(
        cls,
        data: DataConfig,
        *,
        files: Sequence[str],
        tokenizer: PromptTokenizer,
        epochs: int | None,
        shuffle: bool | None = None,
        key: str = "data.train_files",
    ) -> PromptSource:
        """Read and tokenize `files`, which `key` names. A `shuffle` of None means what `data` says.

        Raises `DataError` for malformed rows, for overlong ones unless `data` filters them, and when nothing is left.
        """
        rows = read_rows(files, prompt_key=data.prompt_key, key=key)
        texts = [_text(row, data, tokenizer) for row in rows]
        prompts: list[Prompt] = []
        overlong: list[str] = []
        longest = 0
        for index, (row, ids) in enumerate(zip(rows, tokenizer.encode(texts), strict=True)):
            if not ids:
                raise DataError(f"{key}: {row.place}: the prompt has no token that the tokenizer knows")
            longest = max(longest, len(ids))
            if len(ids) > data.max_prompt_length:
                overlong.append(f"{row.place}: {len(ids)} tokens")
                continue
            prompts.append(_prompt(row, index, ids))
        _report_overlong(overlong, longest, len(rows), data, key)
        if not prompts:
            raise DataError(f"{key}: no usable row in {', '.join(files)}")
        return cls(
            prompts,
            epochs=epochs,
            shuffle=data.shuffle if shuffle is None else shuffle,
            seed=data.seed,
            num_left_out=len(overlong),
        )

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each prompt of one epoch."""
        return [len(prompt.prompt_ids) for prompt in self._prompts]

    @property
    def num_rows(self) -> int:
        """Rows in one epoch, those that are left out not counted."""
        return len(self._prompts)

    @property
    def num_without_truth(self) -> int:
        """Those of `num_rows` that have no ground truth."""
        return sum(prompt.ground_truth is None for prompt in self._prompts)

    def __len__(self) -> int:
        """Return `num_rows`."""
        return len(self._prompts)

    def next(self) -> Prompt | None:
        """Return the next prompt; None when all epochs are over, and ever after."""
        if self._position == len(self._prompts):
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                return None
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return Prompt(
            epoch=self._epoch,
            row=prompt.row,
            prompt_ids=prompt.prompt_ids,
            messages=prompt.messages,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )

    def state(self) -> Mapping[str, JsonValue]:
        """Return the cursor."""
        return {"epoch": self._epoch, "position": self._position, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, JsonValue], /) -> None:
        """Go on from `state`. Raises `DataError` when it belongs to other data."""
        epoch, position, fingerprint = state.get("epoch"), state.get("position"), state.get("fingerprint")
        if fingerprint != self._fingerprint:
            raise DataError(
                f"the saved cursor belongs to other data (fingerprint {fingerprint}, now {self._fingerprint}): files, "
                "tokenizer, data.max_prompt_length, data.seed or data.shuffle changed; restore them, or start anew"
            )
        if not isinstance(epoch, int) or not isinstance(position, int) or not 0 <= position <= len(self._prompts):
            raise DataError(f"not a cursor: {dict(state)}")
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}-{epoch}").shuffle(order)  # text seeds are hashed the same on every Python
        return order


def _text(row: Row, data: DataConfig, tokenizer: PromptTokenizer) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return tokenizer.render(_chat(row.prompt, data.system_prompt), data.chat_template_kwargs)


def _chat(messages: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    """Put the system prompt first, unless the chat brings its own."""
    if system_prompt is None or messages[0].role == "system":
        return messages
    return (Message(role="system", content=system_prompt), *messages)


def _prompt(row: Row, index: int, ids: tuple[int, ...]) -> Prompt:
    return Prompt(
        epoch=0,
        row=index,
        prompt_ids=ids,
        messages=() if isinstance(row.prompt, str) else row.prompt,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
    )


def _report_overlong(overlong: Sequence[str], longest: int, num_rows: int, data: DataConfig, key: str) -> None:
    if not overlong:
        return
    head = (
        f"{key}: {len(overlong)} of {num_rows} prompts are longer than data.max_prompt_length="
        f"{data.max_prompt_length}, the longest has {longest} tokens"
    )
    if data.filter_overlong_prompts:
        _log.warning("%s and are left out", head)
        return
    shown = "".join(f"\n  {line}" for line in overlong[:_SHOWN])
    more = f"\n  and {len(overlong) - _SHOWN} more" if len(overlong) > _SHOWN else ""
    raise DataError(f"{head}; raise it, or set data.filter_overlong_prompts=true:{shown}{more}")


if TYPE_CHECKING:

    def _is_data_source(x: PromptSource) -> DataSource:
        return x
