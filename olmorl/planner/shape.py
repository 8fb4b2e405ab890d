"""A model as the planner sees it: how many FLOPs and bytes a token costs."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from inference.model.architecture import Architecture, read_architecture
from inference.quantization.sizes import ROW_BYTES
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import Quantization


@dataclass(frozen=True, kw_only=True)  # without slots, where nothing could be kept that is computed once
class ModelShape:
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    windows: tuple[int | None, ...] = ()
    """what each layer sees; empty: all see everything"""
    element_size: int = 2
    """bytes of a weight and of a key or value"""
    quantization: Quantization | None = None
    """the format of the layers' matrices, in an engine"""
    quantize_head: bool = False

    @property
    def active_parameters(self) -> int:
        """Those a token is multiplied with: all but the embedding, of which one row is looked up."""
        layer = sum(rows * features for rows, features in self._matrices)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.active_parameters + (0 if self.tied else self.vocab_size * self.hidden_size)

    @property
    def streamed_bytes(self) -> int:
        """Of the weights that every step reads."""
        if self.quantization is None:
            return self.active_parameters * self.element_size
        row_bytes = ROW_BYTES[self.quantization]
        layer = sum(rows * row_bytes(features) for rows, features in self._matrices)
        head_row = row_bytes(self.hidden_size) if self.quantize_head else self.hidden_size * self.element_size
        return self.num_layers * layer + self.vocab_size * head_row

    @property
    def weight_bytes(self) -> int:
        """Of all weights; a quantised head is not the embedding, even where they are tied."""
        if self.tied and not self.quantize_head:
            return self.streamed_bytes
        return self.streamed_bytes + self.vocab_size * self.hidden_size * self.element_size

    @property
    def _matrices(self) -> tuple[tuple[int, int], ...]:
        """(rows, features) of those of a layer."""
        hidden, width = self.hidden_size, self.head_dim * self.num_heads
        return (
            (width + 2 * self.head_dim * self.num_kv_heads, hidden),
            (hidden, width),
            (2 * self.intermediate_size, hidden),
            (hidden, self.intermediate_size),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_size

    def cut_by(self, size: int) -> bool:
        """Whether a tensor-parallel group of so many can divide it among themselves."""
        heads, features, kv_heads = self.num_heads, self.intermediate_size, self.num_kv_heads
        return not (heads % size or features % size or (kv_heads % size and size % kv_heads))

    def within(self, length: int) -> "ModelShape":
        """As sequences of at most `length` see it: a window that none outgrows is no window."""
        return replace(self, windows=()) if self.window is not None and self.window >= length else self

    @cached_property
    def window(self) -> int | None:
        """The one of the sliding layers, if there are any."""
        return next((window for window in self.windows if window is not None), None)

    @cached_property
    def full_share(self) -> float:
        """Share of the layers that see everything."""
        return sum(window is None for window in self.windows) / len(self.windows) if self.windows else 1.0

    def seen(self, context: float) -> float:
        """Tokens that one more token attends to, averaged over the layers."""
        window = self.window
        if window is None or context <= window:
            return context
        return self.full_share * context + (1 - self.full_share) * window

    def flops(self, tokens: float, attended: float, *, drawn: float | None = None) -> float:
        """Of `tokens` tokens that attend to `attended` tokens all together (as `seen` counts); the head computes
        `drawn` of them, None being all."""
        head = self.vocab_size * self.hidden_size
        body = 2.0 * (self.active_parameters - head) * tokens + 2.0 * head * (tokens if drawn is None else drawn)
        return body + 4.0 * self.num_layers * self.num_heads * self.head_dim * attended

    def step_bytes(self, reads: float) -> float:
        """Of a step that reads the weights once and the keys and values of `reads` tokens (as `seen` counts)."""
        return self.streamed_bytes + reads * self.kv_bytes_per_token


def _qwen3(size: str, layers: int, hidden: int, mlp: int, heads: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        name=f"qwen3-{size}", num_layers=layers, hidden_size=hidden, intermediate_size=mlp, num_heads=heads,
        num_kv_heads=8, head_dim=128, vocab_size=151936, tied=tied,
    )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="smollm2-135m", num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3,
            head_dim=64, vocab_size=49152, tied=True,
        ),
        ModelShape(
            name="qwen2.5-7b", num_layers=28, hidden_size=3584, intermediate_size=18944, num_heads=28, num_kv_heads=4,
            head_dim=128, vocab_size=152064, tied=False,
        ),
        _qwen3("0.6b", 28, 1024, 3072, 16, tied=True),
        _qwen3("1.7b", 28, 2048, 6144, 16, tied=True),
        _qwen3("8b", 36, 4096, 12288, 32),
        _qwen3("14b", 40, 5120, 17408, 40),
        _qwen3("32b", 64, 5120, 25600, 64),
        ModelShape(
            name="olmo3-7b", num_layers=32, hidden_size=4096, intermediate_size=11008, num_heads=32, num_kv_heads=32,
            head_dim=128, vocab_size=100278, tied=False, windows=(4096, 4096, 4096, None) * 8,
        ),
        ModelShape(
            name="olmo3-32b", num_layers=64, hidden_size=5120, intermediate_size=27648, num_heads=40, num_kv_heads=8,
            head_dim=128, vocab_size=100278, tied=False, windows=(4096, 4096, 4096, None) * 16,
        ),
    )
}  # fmt: skip


def _known(model: str) -> ModelShape | None:
    """By its name, or by that of a hub id which begins with it: allenai/Olmo-3-7B-Think, allenai/Olmo-3-1025-7B."""
    name = model.rpartition("/")[2].lower().replace("olmo-3-", "olmo3-").replace("olmo3-1025-", "olmo3-")
    names = [known for known in SHAPES if name == known or name.startswith(f"{known}-")]
    return SHAPES[max(names, key=len)] if names else None


def model_shape(model: str) -> ModelShape:
    """Of a Hugging Face folder, or of a name or hub id that is known.

    Raises:
        ConfigError: it is none of them.
        ModelError: the folder holds a model of a family that the engine does not know.
    """
    folder = Path(model)
    if not (folder / "config.json").exists():
        if (known := _known(model)) is not None:
            return known
        raise ConfigError(
            f"model {model!r} is no folder with a config.json and no shape known by name; those are {', '.join(SHAPES)}"
        )
    dtype = json.loads((folder / "config.json").read_text()).get("dtype", "bfloat16")
    return shape_of(read_architecture(folder), name=folder.name, element_size=4 if dtype == "float32" else 2)


def shape_of(arch: Architecture, *, name: str, element_size: int) -> ModelShape:
    windows = tuple(layer.window for layer in arch.layers)
    return ModelShape(
        name=name,
        num_layers=len(arch.layers),
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        tied=arch.tied,
        windows=windows if any(windows) else (),
        element_size=element_size,
    )
