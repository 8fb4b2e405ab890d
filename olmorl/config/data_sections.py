"""Sections on where prompts come from and how answers are judged: data, reward, evaluation."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from olmorl.config.section import PathText, Section

Unscored = Literal["drop_sample", "drop_group", "zero"]

PROCEDURAL = "reasoning_gym:"


def _as_list(values: object, key: str) -> object:
    """A single text or table stands for a list of one."""
    if isinstance(values, dict) and isinstance(values.get(key), str | dict):
        return {**values, key: (values[key],)}
    return values


def _as_sources(values: object, key: str) -> object:
    """A path stands for a table that has it."""
    values = _as_list(values, key)
    if isinstance(values, dict) and isinstance(values.get(key), list | tuple):
        sources = tuple({"path": source} if isinstance(source, str) else source for source in values[key])
        return {**values, key: sources}
    return values


class SourceSection(Section):
    """One source of prompts. Of several, each epoch holds every prompt once, unless weights or counts say otherwise."""

    path: PathText
    """a .jsonl, .json or .parquet file (the first two also .gz), a folder of a Hugging Face data set, a hub id, or
    reasoning_gym:TASK"""
    name: str | None = Field(None, min_length=1)
    """in the metrics; None takes what the rows say, or the path"""
    split: str = "train"
    """of a Hugging Face data set"""
    subset: str | None = None
    """of a Hugging Face data set: its configuration"""
    streaming: bool = False
    """read a hub data set row by row, as far as `limit`, without downloading it whole"""
    limit: int | None = Field(None, ge=1)
    """read only so many rows; of reasoning_gym: make so many"""
    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    """share of this source in each epoch, relative to the other weights"""
    count: int | None = Field(None, ge=1)
    """prompts of this source in each epoch; all its prompts take their turn over the epochs"""
    verifier: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(None, strict=False)
    """takes the place of what the rows say; a name, my_module:my_function, or a list of them"""
    environment: str | None = None
    """what the model talks to before it is judged: a name or my_module:MyClass; takes the place of what rows say"""
    prompt_column: str | None = None
    answer_column: str | None = None
    lengths_column: str | None = None
    """a column that says how many tokens each sample is given, whatever the model says: a load to measure with"""
    options: dict[str, Any] = Field(default_factory=dict)
    """of the task, for reasoning_gym"""

    @model_validator(mode="before")
    @classmethod
    def _one_verifier(cls, values: object) -> object:
        return _as_list(values, "verifier")

    @model_validator(mode="after")
    def _keys_agree(self) -> "SourceSection":
        if self.weight is not None and self.count is not None:
            raise ValueError(f"data source {self.path!r} has both a weight and a count; keep one")
        if self.streaming and self.limit is None:
            raise ValueError(
                f"data source {self.path!r} is streamed without an end; set `limit` to the number of rows to read"
            )
        if self.options and not self.path.startswith(PROCEDURAL):
            raise ValueError(f"data source {self.path!r} has options, which only {PROCEDURAL}TASK takes")
        return self


class DataSection(Section):
    train: tuple[SourceSection, ...] = Field(min_length=1, strict=False)
    """where prompts come from: a path, a table {path, weight, ...}, or a list of them"""
    apply_chat_template: bool | Literal["auto"] = "auto"
    """auto: when the prompts are chat messages, or the tokenizer has a chat template"""
    system_prompt: str | None = None
    shuffle: bool = True

    @model_validator(mode="before")
    @classmethod
    def _paths_are_sources(cls, values: object) -> object:
        return _as_sources(values, "train")

    @model_validator(mode="after")
    def _all_or_none_weighted(self) -> "DataSection":
        weighted = [source.weight is not None for source in self.train]
        if any(weighted) and not all(weighted):
            source = self.train[weighted.index(False)]
            raise ValueError(f"data.train: {source.path!r} has no weight, but others have; give all one, or none")
        return self


class RewardSection(Section):
    verifier: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(None, strict=False)
    """name or my_module:my_function, or a list of them, whose rewards are added; None takes each row's own"""
    weights: dict[str, float] = Field(default_factory=dict)
    """of verifiers, by name, where several judge one row; 1 if not named"""
    remap: dict[str, str] = Field(default_factory=dict)
    """verifiers that take the place of those the rows name: {old = "new"}"""
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    """multiplies every reward"""
    timeout_seconds: float = Field(30.0, gt=0)
    workers: int = Field(1, ge=1)
    """verifier processes"""
    code_api_url: str | None = None
    """a code server in place of this machine's sandbox; None takes CODE_API_URL"""
    code_seconds: float = Field(1.0, gt=0)
    """CPU time of a program for each test"""
    code_memory_mb: int = Field(1024, ge=64)
    code_pass_threshold: float = Field(0.0, ge=0, le=1)
    """share of tests below which a program's reward is 0"""
    judge_url: str | None = None
    """OpenAI-compatible endpoint of the judge; None takes OPENAI_BASE_URL"""
    judge_model: str | None = None
    judge_max_tokens: int = Field(2048, ge=1)
    judge_concurrency: int = Field(32, ge=1)
    """questions the judge is asked at once"""
    judge_requests_per_second: float | None = Field(None, gt=0)
    on_timeout: Unscored = "drop_sample"
    """what a sample without a verdict in time does: it leaves its group, keeps the group from training, counts as 0"""
    on_error: Unscored = "drop_sample"
    """the same, where the verifier failed"""
    on_unscorable: Unscored = "drop_sample"
    """the same, where the ground truth is at fault"""
    outage_seconds: float | None = Field(None, gt=0)
    """stop the run, with its checkpoint, when a judge or code server has been down for so long; None: go on, and let
    on_timeout decide"""

    @model_validator(mode="before")
    @classmethod
    def _one_verifier(cls, values: object) -> object:
        return _as_list(values, "verifier")

    @property
    def unscored(self) -> dict[str, Unscored]:
        """By verdict."""
        return {"timeout": self.on_timeout, "error": self.on_error, "unscorable": self.on_unscorable}

    @model_validator(mode="after")
    def _weights_count(self) -> "RewardSection":
        for name, weight in self.weights.items():
            if weight == 0 or not math.isfinite(weight):
                raise ValueError(f"reward.weights: {name} = {weight}; a weight is a number other than 0")
        return self


class EvalSource(SourceSection):
    """A set of prompts to evaluate on, under its name. Its `verifier`, if it has one, goes before reward.verifier."""

    samples_per_prompt: int | None = Field(None, ge=1)
    """None takes eval.samples_per_prompt"""

    @model_validator(mode="after")
    def _is_no_mixture(self) -> "EvalSource":
        if self.weight is not None or self.count is not None:
            raise ValueError(
                f"eval.data: {self.path!r} has a weight or a count; a set is evaluated whole, or to `limit`"
            )
        return self


class EvalSection(Section):
    data: tuple[EvalSource, ...] = Field((), strict=False)
    """sets of prompts: a path, a table {path, name, samples_per_prompt, ...}, or a list of them"""
    every: int = Field(0, ge=0)
    """steps; 0: only before and after the run"""
    limit: int | None = Field(None, ge=1)
    """prompts of each set"""
    samples_per_prompt: int = Field(1, ge=1)
    """the k of avg@k and pass@k"""
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    max_response_tokens: int | None = Field(None, ge=1)
    """None takes rollout.max_response_tokens"""
    seed: int = 1234

    @model_validator(mode="before")
    @classmethod
    def _paths_are_sources(cls, values: object) -> object:
        return _as_sources(values, "data")
