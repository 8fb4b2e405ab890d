"""What verifiers need to know of the run: plain values, pickled into each verifier's process."""

import os
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSettings:
    """A verifier class that has `from_settings` gets them."""

    code_api_url: str | None = field(default_factory=lambda: os.environ.get("CODE_API_URL") or None)
    """a server with /test_program and /test_program_stdio takes the place of the sandbox"""
    code_seconds: float = 1.0
    """CPU time of each test"""
    code_memory_mb: int = 1024
    code_pass_threshold: float = 0.0
    """share of tests below which the reward is 0"""
    judge_url: str | None = field(default_factory=lambda: os.environ.get("OPENAI_BASE_URL") or None)
    judge_model: str | None = None
    judge_api_key: str | None = field(
        default_factory=lambda: os.environ.get("OLMORL_JUDGE_API_KEY") or os.environ.get("OPENAI_API_KEY") or None,
        repr=False,
    )
    judge_max_tokens: int = 2048
    judge_concurrency: int = 32
    judge_requests_per_second: float | None = None
    timeout_seconds: float = 30.0
