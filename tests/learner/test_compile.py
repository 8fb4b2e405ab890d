"""Compiled layers train as the others do: really compiled, so a compiler is wanted, and half a minute."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from learner.pack import pack
from learner.trainer import Trainer, check_compiler
from olmorl.contract.errors import ConfigError
from olmorl.contract.training import LearnerConfig, TrainSample

CPU = torch.device("cpu")
MICRO_BATCHES = (64, 1, 1000)  # tokens: several sizes for what is compiled once


def compiler_here() -> bool:
    try:
        check_compiler(CPU)
    except ConfigError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not compiler_here(), reason="no C++ compiler is here")


@needs_compiler
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("olmo3", {"activation_checkpointing": True}),  # a sliding layer and a full one
        pytest.param("llama_tied", {"epochs": 2, "kl_beta": 0.1}, marks=pytest.mark.soak),
    ],
)
def test_compiled_layers_train_alike(
    config: LearnerConfig,
    samples: list[TrainSample],
    model_folder: Callable[[str], str],
    family: str,
    settings: dict,
) -> None:
    config = replace(config, model=model_folder(family), **settings)
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = (Trainer(replace(config, compile=compile), device=CPU) for compile in (False, True))
    for version, limit in enumerate(MICRO_BATCHES):
        (batch,) = pack(samples, version=version, num_ranks=1, tokens_per_micro_batch=limit)
        expected, report = (trainer.train_step(batch).metrics for trainer in (plain, compiled))
        for name in ("loss/policy", "optim/grad_norm", "rollout/entropy"):
            assert report[name] == pytest.approx(expected[name], rel=1e-5), name
    ours, theirs = (trainer.policy.hugging_face_parameters() for trainer in (compiled, plain))
    assert ours.keys() == theirs.keys(), "no name tells of the compiler"
    for name in ours:
        torch.testing.assert_close(
            ours[name].detach().full_tensor(), theirs[name].detach().full_tensor(), rtol=1e-5, atol=1e-6, msg=name
        )
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs < 20, f"{graphs} graphs for two layers"
    assert counters["frames"]["total"] == counters["frames"]["ok"]


@needs_compiler
@pytest.mark.soak
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_compiled_ranks_train_as_one_that_is_not(
    start_ranks: Callable, config: LearnerConfig, samples: list[TrainSample], checkpointing: bool
) -> None:
    """Their layers are brought together and parted again around what is compiled and what it keeps for the backward."""
    one = Trainer(config, device=CPU)
    two = start_ranks(replace(config, compile=True, activation_checkpointing=checkpointing), 2)
    for version, limit in enumerate(MICRO_BATCHES):
        (whole,) = pack(samples, version=version, num_ranks=1, tokens_per_micro_batch=limit)
        expected = one.train_step(whole).metrics
        halves = pack(samples, version=version, num_ranks=2, tokens_per_micro_batch=limit)
        for report in two.call("train_step", each=halves):
            for name in ("loss/policy", "optim/grad_norm", "rollout/entropy"):
                assert report.metrics[name] == pytest.approx(expected[name], rel=1e-5), name


def test_without_a_compiler_nothing_starts(monkeypatch: pytest.MonkeyPatch, config: LearnerConfig) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"compile = true needs a compiler, and none of (g|clang)\+\+ is here"):
        Trainer(replace(config, compile=True), device=CPU)
    with pytest.raises(ConfigError, match="gcc"):
        check_compiler(torch.device("cuda"))
