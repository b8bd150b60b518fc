"""From response ids to the text that a reward function reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["load_decoder"]


def load_decoder(path: str) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes ids without special tokens.

    Uses the light `tokenizers` library when the folder has a ``tokenizer.json``, and transformers otherwise. Raises
    `DataError` when there is no tokenizer in `path`.
    """
    file = Path(path) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        light = Tokenizer.from_file(str(file))
        return lambda ids: str(light.decode(list(ids), skip_special_tokens=True))
    from transformers import AutoTokenizer

    try:
        heavy = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise DataError(f"no tokenizer in {path!r}: {exc}") from exc
    return lambda ids: str(heavy.decode(list(ids), skip_special_tokens=True))
