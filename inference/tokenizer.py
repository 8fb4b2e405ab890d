"""The tokenizer of a model folder, loaded when text is first needed: many runs only ever see token ids."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import cached_property
from pathlib import Path
from typing import Any

from olmorl.contract.errors import ModelError

_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
# How byte-level vocabularies write a byte: as itself, or as the next character behind 255.
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))
}
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        return any((self.folder / name).is_file() for name in _FILES)

    @cached_property
    def _loaded(self) -> Any:
        if not self.exists:
            raise ModelError(f"{self.folder} has no tokenizer; give prompts as token ids and no stop strings")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: with what the tokenizer adds to a text (BOS). A rendered chat has its own already.

        Raises ValueError for what is no Unicode."""
        text.encode()  # half a surrogate pair: ValueError here, TypeError in there
        return list(self._loaded.encode(text, add_special_tokens=special))

    def decode(self, token_ids: Items[int], *, skip_special: bool = True) -> str:
        """Nothing is tidied up, so that text follows from the ids alone."""
        text = self._loaded.decode(
            list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def bytes_of(self, token_id: int) -> bytes:
        """Of a token that is a part of a character."""
        entry = str(self._loaded.convert_ids_to_tokens(token_id))
        if entry.startswith("<0x"):
            return bytes.fromhex(entry[3:5])
        return bytes(_BYTES[c] for c in entry) if _BYTES.keys() >= set(entry) else self.decode([token_id]).encode()

    @property
    def has_chat_template(self) -> bool:
        return self.exists and self._loaded.chat_template is not None

    def render_chat(self, messages: Items[Mapping[str, Any]], **options: Any) -> str:
        """The text that the model's chat template makes of messages. Raises what the template raises."""
        return str(self._loaded.apply_chat_template(list(messages), tokenize=False, **options))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary: a bound on how few tokens a text can have."""
        return max(map(len, self._loaded.get_vocab()))
