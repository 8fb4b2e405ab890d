"""The source of drafts that a config asks for."""

from inference.model.load import load_decoder, resolve_folder
from inference.runner import Runner, RunnerConfig
from inference.speculative.draft_model import DraftModel
from inference.speculative.speculation import Speculation
from inference.speculative.step_limit import measured_step_tokens
from inference.speculative.suffix_drafts import SuffixDrafts
from inference.stats import CostModel, EngineStats
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig


def new_speculation(config: EngineConfig, runner: Runner, *, totals: EngineStats) -> Speculation:
    """`runner` is that of the model whose tokens are guessed, and nobody uses it yet. What a draft model computes is
    counted in `totals` too."""
    if config.speculative is None:
        return Speculation()
    target = runner.decoder
    max_model_len = config.max_model_len or target.arch.max_positions
    step_tokens = config.speculative_step_tokens
    if step_tokens == 0:
        step_tokens = measured_step_tokens(runner, max_tokens=min(config.max_tokens_per_step, max_model_len))
    limits = {"max_draft": config.max_draft, "step_tokens": step_tokens}
    if config.speculative == "suffix":
        return SuffixDrafts(**limits)
    assert config.draft_model is not None, "check_config"
    decoder = load_decoder(
        resolve_folder(config.draft_model),
        dtype=config.dtype,
        device=str(target.device),
        max_model_len=max_model_len,
        kernels=config.kernels,
    )
    if decoder.arch.vocab_size != target.arch.vocab_size:
        raise ConfigError(
            f"draft_model {config.draft_model} has {decoder.arch.vocab_size} tokens, the model "
            f"{target.arch.vocab_size}; a draft model needs the model's vocabulary"
        )
    costs = CostModel(
        decoder.arch, num_parameters=decoder.num_parameters, element_size=decoder.embedding.element_size()
    )
    pool = RunnerConfig(num_blocks=runner.config.num_blocks, block_size=config.block_size)
    return DraftModel(
        decoder, pool, **limits, max_tokens_per_step=config.max_tokens_per_step, costs=costs, totals=totals
    )
