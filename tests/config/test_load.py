import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.config.data_sections import EvalSource, SourceSection
from olmorl.config.dump import dump_toml
from olmorl.config.load import load_config
from olmorl.config.names import ALIASES, ELSEWHERE, FIELDS
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError

BASE = '[model]\npath = "m"\n[data]\ntrain = "x.jsonl"\n'
NEEDED = ("model.path=m", "data.train=x.jsonl")


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "c.toml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_later_wins(write) -> None:
    path = write(BASE + "[rollout]\nprompts_per_step = 4\n")
    assert load_config(path).rollout.prompts_per_step == 4
    config = load_config(path, ["rollout.prompts_per_step=5", "rollout.prompts_per_step=6"])
    assert config.rollout.prompts_per_step == 6


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optim.lr=1e-4", "optim", "lr", 1e-4),
        ("optim.lr=1", "optim", "lr", 1.0),
        ("optim.betas=[0.9, 0.95]", "optim", "betas", (0.9, 0.95)),
        ("run.name=2024", "run", "name", "2024"),
        ("run.name='a = b'", "run", "name", "a = b"),
        ("run.name=a=b", "run", "name", "a=b"),
        ("rollout.active_sampling=false", "rollout", "active_sampling", False),
        ("rollout.active_sampling=True", "rollout", "active_sampling", True),
        ("rollout.window=none", "rollout", "window", None),
        ("eval.data=none", "eval", "data", ()),
        ("data.apply_chat_template=auto", "data", "apply_chat_template", "auto"),
        ("data.apply_chat_template=true", "data", "apply_chat_template", True),
        (
            'data.train=["a.jsonl", {path="b.jsonl", count=3}]',
            "data",
            "train",
            (SourceSection(path="a.jsonl"), SourceSection(path="b.jsonl", count=3)),
        ),
        ('data.train={path="a.jsonl", weight=2}', "data", "train", (SourceSection(path="a.jsonl", weight=2),)),
        ("reward.weights={math=0.5}", "reward", "weights", {"math": 0.5}),
        ("sync.mode=drain", "sync", "mode", "drain"),
        ("reward.verifier=my_module:check", "reward", "verifier", ("my_module:check",)),
        ("prompts_per_step=7", "rollout", "prompts_per_step", 7),
        ("loss.importance_cap=inf", "loss", "importance_cap", float("inf")),
    ],
)
def test_override_values(override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load_config(None, [*NEEDED, override]), section), key) == value


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (
            BASE + "[rollout]\nprompts_per_stp = 3",
            (),
            ["c.toml", "rollout.prompts_per_stp", "rollout.prompts_per_step"],
        ),
        (BASE + "[rolout]\nprompts_per_step = 3", (), ["c.toml", "'rolout'", "rollout.prompts_per_step"]),
        (BASE + "[rolout]\n", (), ["'rolout'", "rollout"]),
        (BASE, ("learner.clip_low=1",), ["override 'learner.clip_low=1'", "loss.clip_low"]),
        (BASE, ("rollout.response_length=1",), ["rollout.max_response_tokens"]),
        (BASE, ("rollout.group_size=8",), ["did you mean rollout.samples_per_prompt?"]),
        (BASE, ("learning_rate=1e-5",), ["did you mean optim.lr?"]),
        (BASE + "[optim]\nlearning_rate = 1e-5", (), ["did you mean optim.lr?"]),
        (BASE, ("workers=1",), ["reward.workers", "inference.workers", "learner.workers"]),
        (BASE, ("rollout=3",), ["is a section"]),
        (BASE, ("foo",), ["section.key=value"]),
        (BASE, ("data.train=[a",), ["not valid TOML"]),
        (BASE, ('data.train=[{path="a", wieght=1}]',), ["data.train[0] has an unknown key 'wieght'", "mean weight"]),
        (BASE, ('data.train=[{path="a", weight=0}]',), ["data.train[0].weight is 0", "greater than 0"]),
        (BASE, ('data.train=[{path="a", weight=1}, "b"]',), ["'b' has no weight"]),
        (BASE, ('data.train={path="a", weight=1, count=2}',), ["'a' has both a weight and a count"]),
        (BASE, ('data.train={path="a", streaming=true}',), ["'a' is streamed without an end", "limit"]),
        (BASE, ('data.train={path="a", options={x=1}}',), ["'a' has options", "reasoning_gym:TASK"]),
        (BASE, ("reward.weights={math=0}",), ["math = 0", "other than 0"]),
        (BASE + "[reward.weihts]\nmath = 1\n", (), ["reward.weihts", "did you mean reward.weights"]),
        (
            BASE + "[rollout]\nprompts_per_step = 'many'",
            (),
            ["rollout.prompts_per_step is 'many'", "c.toml", "integer"],
        ),
        (BASE + "[rollout]\nprompts_per_step = '16'", (), ["'16'", "integer"]),
        (BASE + "[rollout]\nprompts_per_step = true", (), ["True", "integer"]),
        (BASE + "[rollout]\nprompts_per_step = 0", (), ["is 0", "greater than or equal to 1"]),
        (
            BASE,
            ("sync.mode=fast",),
            ["sync.mode is 'fast'", "override 'sync.mode=fast'", "'inflight', 'pause' or 'drain'"],
        ),
        (BASE, ("data.apply_chat_template=maybe",), ["true or false or 'auto'"]),
        (BASE, ("optim.lr=nan",), ["optim.lr is nan"]),
        (BASE, ("optim.betas=[0.9]",), ["optim.betas is"]),
        (BASE, ("optim.betas=[0.9, 'x']",), ["optim.betas[1] is 'x'", "a number"]),
        (BASE, ("inflight_updates=3",), ["inflight_updates is 3", "true or false"]),
        (BASE, ("rollout.async_steps=2", "rollout.window=1"), ["window = 1", "async_steps = 2"]),
        (BASE, ("rollout.samples_per_prompt=1",), ["samples_per_prompt is 1", "equal to 2", "nothing to be compared"]),
        (BASE, ("run.name=",), ["run.name is ''", "one character or more"]),
        (BASE, ("run.name=.",), ["run.name = '.'", "set run.output_dir instead"]),
        (BASE, ("run.name=../x",), ["run.name = '../x'"]),
        (BASE, ("sampling.stop=['a', '']",), ["sampling.stop[1] is ''", "one character or more"]),
        (BASE, ("optim.betas=[0.9, 1.0]",), ["optim.betas[1] is 1.0", "less than 1"]),
        (BASE, ("optim.lr=inf",), ["optim.lr is inf", "finite"]),
        (BASE, ("reward.scale=inf",), ["reward.scale is inf", "finite"]),
        (BASE, ('data.train={path="a", weight=inf}',), ["weight is inf", "finite"]),
        (BASE, ('data.train={path="a", name=""}',), ["data.train[0].name is ''"]),
        (BASE, ("data.train=[]",), ["data.train is ()", "a list of one or more"]),
        (BASE, ("reward.verifier=[]",), ["reward.verifier is []", "a list of one or more"]),
        (BASE, ("sampling.top_k=3",), ["loss.allow_truncated_sampling"]),
        (BASE, ("inference.quantize_head=true",), ["quantize_head needs inference.quantization"]),
        (
            BASE,
            ("inference.quantization=int8", "inference.tensor_parallel=2"),
            ["computes on one device", "inference.tensor_parallel is 2"],
        ),
        (BASE, ("inference.speculative=model",), ["draft_model and speculative = 'model' go together"]),
        (
            BASE,
            ("inference.speculative=model", "inference.draft_model=small", "inference.kv_cache_tokens=auto"),
            ["kv_cache_tokens is 'auto'", "speculative = 'suffix'"],
        ),
        (BASE, ("inference.quantization=int8", "logging.schedule=true"), ["logging.schedule keeps whole weights"]),
        ("prompts_per_step = 5\n[rollout]\nprompts_per_step = 3\n" + BASE, (), ["set twice"]),
        ("[run]\nname = 'x'", (), ["model.path is missing", "data.train is missing"]),
        ("x = \n", (), ["not valid TOML", "line 1"]),
    ],
)
def test_refusals_name_what_where_and_how(write, text: str, overrides: tuple[str, ...], words: list[str]) -> None:
    message = refusal(write(text), *overrides)
    for word in words:
        assert word in message


def test_unreadable_files(tmp_path: Path) -> None:
    assert "no such config file" in refusal(tmp_path / "nope.toml")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(tmp_path / "bad.toml")


def test_aliases_are_noted(write, caplog: pytest.LogCaptureFixture) -> None:
    path = write("num_unique_prompts_rollout = 5\ninflight_updates = true\n" + BASE)
    with caplog.at_level(logging.WARNING):
        config = load_config(path, ["clip_higher=0.3", "inflight_updates=false"])
    assert (config.rollout.prompts_per_step, config.loss.clip_high, config.sync.mode) == (5, 0.3, "drain")
    assert "num_unique_prompts_rollout is taken as rollout.prompts_per_step" in caplog.text
    assert set(ALIASES.values()) <= set(FIELDS) and set(ELSEWHERE.values()) <= set(FIELDS)
    assert not set(ELSEWHERE) & {*ALIASES, *(key.split(".")[1] for key in FIELDS)}, "they mean something here"


def test_paths_from_here_then_from_the_config(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "x.jsonl").touch()
    (tmp_path / "m").mkdir()
    path = write(BASE)
    config = load_config(path, ["eval.data=nowhere.jsonl"])
    assert config.data.train == (SourceSection(path=str(tmp_path / "x.jsonl")),)
    assert config.model.path == str(tmp_path / "m")
    assert config.eval.data == (EvalSource(path="nowhere.jsonl"),)
    (here / "x.jsonl").touch()
    assert load_config(path).data.train == (SourceSection(path=str(here / "x.jsonl")),)


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
path_text = text.filter(lambda name: "\0" not in name)
folder = path_text.filter(lambda name: "/" not in name and name not in (".", ".."))
positive = st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False)


@given(
    name=folder,
    stop=st.lists(text),
    train=st.lists(path_text, min_size=1),
    lr=positive,
    window=st.none() | st.integers(1, 9),
)
def test_dump_then_load_is_the_same_config(
    name: str, stop: list[str], train: list[str], lr: float, window: int | None
) -> None:
    config = Config.model_validate(
        {
            "run": {"name": name, "output_dir": "a b"},
            "model": {"path": "m"},
            "data": {"train": train},
            "sampling": {"stop": stop},
            "optim": {"lr": lr},
            "rollout": {"window": window},
        }
    )
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "config.toml"
        path.write_text(dump_toml(config), encoding="utf-8")
        loaded = load_config(path)
    # paths that happen to exist become absolute; all else is untouched
    assert loaded.model_copy(update={"data": config.data}) == config


@pytest.mark.parametrize("key", ["run.name", "run.output_dir", "model.path", "data.train", "eval.data"])
def test_no_path_has_a_nul(write, key: str) -> None:
    path = write(BASE)
    with pytest.raises(ConfigError, match=rf"{key}\S* is .*; it must be a path without NUL characters"):
        load_config(path, [f'{key}="~\\u0000"'])


def test_what_may_be_none_defaults_to_none() -> None:
    """TOML cannot say None, so a dump leaves such keys out."""
    for name, info in FIELDS.items():
        if info.annotation is not None and type(None) in getattr(info.annotation, "__args__", ()):
            assert info.default is None, name


def test_imports_no_torch() -> None:
    code = (
        "import sys, olmorl.config.load, olmorl.config.dump; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_learner_switches_are_checked_together() -> None:
    config = load_config(None, [*NEEDED, "loss.importance_band=[0.5, 5.0]", "beta=0.1", "num_mini_batches=4"])
    assert (config.loss.importance_band, config.loss.kl_beta, config.optim.mini_batches) == ((0.5, 5.0), 0.1, 4)
    assert "importance_band = [5.0, 0.5]" in refusal(None, *NEEDED, "loss.importance_band=[5.0, 0.5]")
    assert "does not divide learner.workers = 4" in refusal(None, *NEEDED, "learner.workers=4", "learner.shard_size=3")
    assert "loss.objective" in refusal(None, *NEEDED, "loss.objective=ppo")


def test_one_gpu_for_both_roles_is_checked_as_a_whole() -> None:
    halves = (*NEEDED, "inference.gpu_share=0.4", "learner.gpu_share=0.6")
    assert load_config(None, halves).shares_gpu
    assert not load_config(None, NEEDED).shares_gpu
    assert "give both, or none" in refusal(None, *NEEDED, "learner.gpu_share=0.5")
    assert "shares that sum to 1" in refusal(None, *halves, "inference.workers=2")
    assert "one learner worker" in refusal(None, *halves, "learner.gpu_share=0.1", "learner.workers=2")
    assert "max_workers has no meaning with gpu_share" in refusal(None, *halves, "inference.max_workers=2")
    assert "refuses two workers on one GPU" in refusal(None, *halves, "sync.transport=nccl")
    assert "no meaning" in refusal(None, *NEEDED, "sync.transport=ipc", "sync.staging=host")
