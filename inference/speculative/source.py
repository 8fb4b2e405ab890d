"""The source of drafts that a config asks for."""

from inference.model.decoder import Decoder
from inference.model.load import load_decoder, resolve_folder
from inference.runner import RunnerConfig
from inference.speculative.draft_model import DraftModel
from inference.speculative.speculation import Speculation
from inference.speculative.suffix_drafts import SuffixDrafts
from inference.stats import CostModel, EngineStats
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig


def new_speculation(config: EngineConfig, target: Decoder, *, num_blocks: int, totals: EngineStats) -> Speculation:
    """`num_blocks`: of the target's KV pool. What a draft model computes is counted in `totals` too."""
    limits = {"max_draft": config.max_draft, "step_tokens": config.speculative_step_tokens}
    if config.speculative is None:
        return Speculation()
    if config.speculative == "suffix":
        return SuffixDrafts(**limits)
    assert config.draft_model is not None, "check_config"
    decoder = load_decoder(
        resolve_folder(config.draft_model),
        dtype=config.dtype,
        device=str(target.device),
        max_model_len=config.max_model_len or target.arch.max_positions,
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
    runner = RunnerConfig(num_blocks=num_blocks, block_size=config.block_size)
    return DraftModel(
        decoder, runner, **limits, max_tokens_per_step=config.max_tokens_per_step, costs=costs, totals=totals
    )
