"""From prompts to token ids, without torch.

`transformers.AutoTokenizer` imports torch; `PreTrainedTokenizerFast` reads the same tokenizer.json, special tokens
and chat template without it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jinja2
import numpy as np
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import PreTrainedTokenizerFast

from olmorl.contract.errors import ConfigError, DataError, ModelError
from olmorl.data.dialect import Messages

HUB_FILES = ("config.json", "tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json")


def find_model(model: str) -> Path:
    """The folder of a local model, or of what a hub id has beside its weights. Raises ModelError."""
    return Path(model) if os.path.isdir(model) else _download(model)


def load_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a local Hugging Face folder or a hub id. Raises ModelError."""
    folder = find_model(model)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{model}: the model has no tokenizer.json; save its fast tokenizer beside the weights")
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model}: the tokenizer cannot be read: {error}") from None


def _download(model: str) -> Path:
    """One call for all files: asked for them one by one, an offline hub retries each for half a minute."""
    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except HFValidationError:
        raise ModelError(f"{model}: no such model folder, and not of the form of a hub id") from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{model}: no such model folder, and not to be had from the hub: {reason}") from None


class PromptEncoder:
    """Renders prompts and encodes them once.

    With a chat template: the template writes all special tokens, so none is added (no second BOS). Without: the text
    gets the tokens that this tokenizer puts in front of a text (BOS, or none), unless it begins with them already;
    what a tokenizer appends (EOS) is left off, for the model is to go on.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        apply_chat_template: bool | Literal["auto"] = "auto",
        system_prompt: str | None = None,
    ) -> None:
        if apply_chat_template is True and tokenizer.chat_template is None:
            raise ConfigError("data.apply_chat_template is true, but the model's tokenizer has no chat template")
        self.tokenizer = tokenizer
        self.templated = tokenizer.chat_template is not None and apply_chat_template is not False
        self.system_prompt = system_prompt
        if system_prompt is not None and not self.templated:
            raise ConfigError("data.system_prompt needs a chat template, and none is applied to this data")
        self._prefix = [] if self.templated else _prefix_ids(tokenizer)

    def render(self, prompt: str | Messages, *, place: str) -> str:
        """The text the model reads. `place` names the row in a DataError."""
        return self._template(prompt, place) if self.templated else _plain_text(prompt, place)

    def _template(self, prompt: str | Messages, place: str) -> str:
        messages = list(prompt) if isinstance(prompt, tuple) else [{"role": "user", "content": prompt}]
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise DataError(f"{place}: the chat template refuses this prompt: {error}") from None
        assert isinstance(text, str)
        return text

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of rendered texts, each [P] int32."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()  # a tokenizer.json may carry both; a prompt is never cut or padded silently
        backend.no_padding()
        prefix = self._prefix
        encoded = []
        for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False):
            ids = encoding.ids
            if ids[: len(prefix)] != prefix:
                ids = prefix + ids
            encoded.append(np.array(ids, dtype=np.int32))
        return encoded


def _plain_text(prompt: str | Messages, place: str) -> str:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    raise DataError(f"{place}: {len(prompt)} chat messages, but no chat template is applied that could join them")


def _prefix_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """What the tokenizer puts in front of every text: [BOS], or nothing."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    raise ModelError("the tokenizer changes a text's own tokens when it adds special tokens; prompts cannot be encoded")
