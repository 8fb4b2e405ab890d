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
from olmorl.planner.plan import doubts
from olmorl.planner.question import question_of
from olmorl.planner.shape import model_shape
from olmorl.planner.split import given

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.toml"))
GPU_RECIPES = [path for path in RECIPES if re.search("GPUs? of", path.read_text())]
WINDOW = 4096


def header(path: Path) -> str:
    return "".join(re.match(r"(?:#.*\n)*", path.read_text()).group().replace("# ", ""))  # type: ignore[union-attr]


def engine_bytes(config: Config) -> int:
    """Of one GPU: weights, the staged copy of an update, and both KV pools, in bfloat16."""
    shape, inference = model_shape(config.model.path), config.inference
    sliding = sum(window is not None for window in shape.windows)
    blocks = inference.kv_cache_tokens // inference.block_size
    in_window = window_pool_blocks(
        WINDOW,
        block_size=inference.block_size,
        num_blocks=blocks,
        max_num_seqs=inference.max_num_seqs,
        max_tokens_per_step=inference.max_tokens_per_step,
    )
    a_layer = 2 * 2 * shape.num_kv_heads * shape.head_dim * inference.block_size
    whole = 2 * shape.weight_bytes + a_layer * ((shape.num_layers - sliding) * blocks + sliding * in_window)
    return whole // inference.tensor_parallel


def learner_bytes(config: Config) -> int:
    """Parameters, gradients and two moments in float32, sharded; activations between layers and within one."""
    shape = model_shape(config.model.path)
    hidden, attention = shape.hidden_size, shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    tokens = config.learner.tokens_per_micro_batch
    state = 16 * shape.num_parameters // config.learner.workers
    between = 2 * tokens * hidden * shape.num_layers
    within = 2 * tokens * (4 * hidden + 2 * attention + 4 * shape.intermediate_size)
    head = 3 * 4 * config.learner.logprob_chunk_tokens * shape.vocab_size
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


def times() -> dict[str, tuple[str, str]]:
    """By recipe: how long on what, and by whom."""
    told = r"^Time: (?:about )?(.*?)[,;] (.*)"
    found = {path.name: re.search(told, header(path), re.MULTILINE) for path in RECIPES}
    assert None not in found.values(), found
    return {name: (match.group(1), match.group(2)) for name, match in found.items() if match}


def test_the_page_of_recipes_says_what_they_say() -> None:
    rows = re.findall(r"^\| `configs/(\S+)` \|.*\| (.*) \| (.*) \|$", (ROOT / "docs" / "recipes.md").read_text(), re.M)
    assert {name: time for name, _, time in rows} == {name: time for name, (time, _) in times().items()}
    for name, wants, _ in rows:
        assert wants.split(",")[0].split(";")[0] in header(ROOT / "configs" / name), name


PLANNED = [path for path in GPU_RECIPES if "Time: about" in path.read_text()]


def test_times_on_gpus_say_how_they_were_found() -> None:
    for path in PLANNED:
        time, by = times()[path.name]
        assert re.fullmatch(r"[\d.]+ (hours|days) on (H100s|an H100)", time), path
        assert by == f"by the planner: olmorl plan configs/{path.name} --as-given"


@pytest.mark.soak
@pytest.mark.timeout(900)  # some simulate 60 engines
@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_the_time_is_the_planners(path: Path) -> None:
    config = load_config(path)
    number, unit = times()[path.name][0].split()[:2]
    question = question_of(config, num_devices=None, device_name="h100")
    plan = given(config, question)
    assert not doubts(question, plan)
    seconds = plan.step_seconds * config.run.steps
    assert seconds / {"hours": 3600, "days": 86400}[unit] == pytest.approx(float(number), rel=0.15)


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
