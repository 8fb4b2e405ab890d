"""Every recipe says what it is and what it wants, fits there, and is refused with the right words where it does not.

Nothing here has a GPU: memory is arithmetic over the shapes of the models, in bytes.
"""

import re
import tomllib
from pathlib import Path

import pytest

from inference.kv_blocks import window_pool_blocks
from olmorl.cli.main import run
from olmorl.config.load import load_config
from olmorl.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.toml"))
GPU_RECIPES = [path for path in RECIPES if re.search("GPUs? of", path.read_text())]
WINDOW = 4096

# layers, of them sliding, hidden, heads, KV heads, head size, MLP, vocabulary, tied
SHAPES = {
    "Olmo-3-7B": (32, 24, 4096, 32, 32, 128, 11008, 100278, False),
    "Olmo-3-1025-7B": (32, 24, 4096, 32, 32, 128, 11008, 100278, False),
    "Olmo-3-32B": (64, 48, 5120, 40, 8, 128, 27648, 100278, False),
    "Qwen3-0.6B": (28, 0, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": (28, 0, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen3-32B": (64, 0, 5120, 64, 8, 128, 25600, 151936, False),
    "Qwen3-8B": (36, 0, 4096, 32, 8, 128, 12288, 151936, False),
    "Qwen3-14B": (40, 0, 5120, 40, 8, 128, 17408, 151936, False),
}


def header(path: Path) -> str:
    return "".join(re.match(r"(?:#.*\n)*", path.read_text()).group().replace("# ", ""))  # type: ignore[union-attr]


def shape(config: Config) -> tuple[int, ...]:
    name = config.model.path.rpartition("/")[2]
    return next(numbers for model, numbers in SHAPES.items() if name.startswith(model))


def num_parameters(config: Config) -> int:
    layers, _, hidden, heads, kv_heads, size, mlp, vocabulary, tied = shape(config)
    layer = 2 * hidden * size * (heads + kv_heads) + 3 * hidden * mlp
    return layers * layer + vocabulary * hidden * (1 if tied else 2)


def engine_bytes(config: Config) -> int:
    """Of one GPU: weights, the staged copy of an update, and both KV pools, in bfloat16."""
    layers, sliding, _, _, kv_heads, size, *_ = shape(config)
    inference = config.inference
    blocks = inference.kv_cache_tokens // inference.block_size
    in_window = window_pool_blocks(
        WINDOW,
        block_size=inference.block_size,
        num_blocks=blocks,
        max_num_seqs=inference.max_num_seqs,
        max_tokens_per_step=inference.max_tokens_per_step,
    )
    a_layer = 2 * 2 * kv_heads * size * inference.block_size
    whole = 2 * 2 * num_parameters(config) + a_layer * ((layers - sliding) * blocks + sliding * in_window)
    return whole // inference.tensor_parallel


def learner_bytes(config: Config) -> int:
    """Parameters, gradients and two moments in float32, sharded; activations between layers and within one."""
    layers, _, hidden, heads, kv_heads, size, mlp, vocabulary, _ = shape(config)
    tokens = config.learner.tokens_per_micro_batch
    state = 16 * num_parameters(config) // config.learner.workers
    between = 2 * tokens * hidden * layers
    within = 2 * tokens * (4 * hidden + 2 * size * (heads + kv_heads) + 4 * mlp)
    head = 3 * 4 * config.learner.logprob_chunk_tokens * vocabulary
    return state + between + within + head


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_says_what_it_wants_fits_there_and_is_refused_where_it_does_not(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = header(path)
    assert re.search(r"^Hardware: .{20,}", text, re.MULTILINE)
    command = re.search(r"olmorl (train configs/(\S+) --dry-run --cluster (\d+)x(\d+)x(\d+))", text)
    assert command and command.group(2) == path.name
    assert run(command.group(1).split()) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    config = load_config(path)
    workers = config.inference.workers * config.inference.tensor_parallel + config.learner.workers
    nodes, cpus, gpus = (int(number) for number in command.group(3, 4, 5))
    assert printed["run"]["name"] == config.run.name
    needed = 1 if config.shares_gpu else workers
    assert needed == nodes * gpus if gpus else workers <= nodes * cpus

    small = f"{nodes}x{cpus}x{gpus - 1}" if gpus else f"1x{workers - 1}x0"
    assert run(["train", str(path), "--dry-run", "--cluster", small]) == 2
    message = capsys.readouterr().err
    assert f"needs {needed} {'GPU' if gpus else 'CPU'}s" in message and "missing" in message


@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_workers_fit_their_gpus(path: Path) -> None:
    config = load_config(path)
    size = int(re.search(r"GPUs? of (\d+) GB", header(path)).group(1)) * 2**30  # type: ignore[union-attr]
    assert 0.5 * config.inference.gpu_share * size < engine_bytes(config) < 0.92 * config.inference.gpu_share * size
    assert learner_bytes(config) < 0.9 * config.learner.gpu_share * size
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert config.learner.tokens_per_micro_batch >= longest


@pytest.mark.parametrize(
    ("name", "row"),
    [  # OLMo 3's report, table 49: lr, mini-batches, steps, prompt, response, batch, group, cap, learners, engines, k
        ("7b_think", (1e-6, 1, 1400, 2048, 32768, 64, 8, float("inf"), 16, 56, 1)),
        ("32b_think", (2e-6, 1, 750, 2048, 32768, 128, 8, 2.0, 64, 20, 8)),
        ("7b_instruct", (1e-6, 4, 450, 2048, 8192, 64, 8, float("inf"), 8, 56, 8)),
        ("7b_rlzero_math", (1e-6, 1, 2000, 2048, 16384, 32, 8, 2.0, 8, 64, 8)),
    ],
)
def test_olmo_3_is_as_published(name: str, row: tuple[float, ...]) -> None:
    config = load_config(ROOT / "configs" / f"olmo3_{name}.toml")
    rollout = config.rollout
    assert row == (
        config.optim.lr,
        config.optim.mini_batches,
        config.run.steps,
        rollout.max_prompt_tokens,
        rollout.max_response_tokens,
        rollout.prompts_per_step,
        rollout.samples_per_prompt,
        config.loss.importance_cap,
        config.learner.workers,
        config.inference.workers,
        rollout.async_steps,
    )
    loss = config.loss
    assert config.inference.tensor_parallel == (8 if name == "32b_think" else 1)
    assert (config.sampling.temperature, loss.clip_low, loss.clip_high, loss.kl_beta) == (1.0, 0.2, 0.272, 0.0)
    assert (loss.advantage, config.optim.schedule, config.reward.scale) == ("centered", "constant", 10)


def test_a_cluster_is_described_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = str(ROOT / "configs" / "quickstart.toml")
    assert run(["train", quickstart, "--dry-run", "--cluster", "9 nodes"]) == 2
    assert "NODESxCPUSxGPUS" in capsys.readouterr().err
    assert run(["train", quickstart, "--cluster", "1x2x0"]) == 2
    assert "--dry-run" in capsys.readouterr().err
