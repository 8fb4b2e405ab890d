"""What one `olmorl rollout` is to do, and which of it must be the same when it is resumed."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from olmorl.config.data_sections import SourceSection
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig, SamplingParams

OWN_VERIFIERS = "auto"  # each row's own


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutJob:
    engine: EngineConfig
    prompts: SourceSection
    out: Path
    params: SamplingParams
    """without a seed: each prompt has one of its own, from `seed` and its place"""
    seed: int = 0
    verifier: tuple[str, ...] | None = None
    """None scores nothing; ("auto",) takes what the rows name"""
    verifier_workers: int = 1
    verifier_timeout: float = 30.0
    workers: int = 1
    address: str | None = None
    """of a running Ray cluster; None takes RAY_ADDRESS, else starts one here"""
    resume: bool = False
    rows_per_file: int = 100_000
    apply_chat_template: bool | None = None
    """None: if the tokenizer has one"""
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "rows_per_file", "verifier_workers", "verifier_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be > 0")
        if self.params.n > 65535:
            raise ConfigError(f"-n is {self.params.n}; at most 65535 samples of one prompt are kept count of")

    @property
    def given_verifiers(self) -> tuple[str, ...] | None:
        """That take the place of what rows name; None: each row's own."""
        return None if self.verifier == (OWN_VERIFIERS,) else self.verifier or ()

    @property
    def identity(self) -> dict[str, Any]:
        """Plain values that decide the samples: a resumed job must have the same. How fast they are made is not among
        them (workers, batch sizes)."""
        source = self.prompts.model_dump(mode="json", exclude={"limit", "streaming"})
        engine = ("max_model_len", "dtype", "quantization", "quantize_head", "kv_cache_dtype")
        return {
            "model": os.path.abspath(self.engine.model) if os.path.isdir(self.engine.model) else self.engine.model,
            **{name: getattr(self.engine, name) for name in engine},
            "prompts": source
            | {"path": os.path.abspath(source["path"]) if os.path.exists(source["path"]) else source["path"]},
            "sampling": {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.params).items()},
            "seed": self.seed,
            "verifier": None if self.verifier is None else list(self.verifier),
            "apply_chat_template": self.apply_chat_template,
            "system_prompt": self.system_prompt,
        }
