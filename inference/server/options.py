"""What a server is started with, beside its engine."""

from dataclasses import dataclass

from olmorl.contract.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one"""
    api_key: str | None = None
    """every route but /health wants it; without one, the routes of operators are closed"""
    model_name: str | None = None
    """what clients call the model; None takes what the engine was told to load"""
    max_samples: int = 1024
    """samples held at once, running and waiting; beyond them requests are turned away with 429"""
    max_body_bytes: int = 8 << 20
    request_seconds: float = 600.0
    """a request that takes longer ends with what it has; clients may ask for less"""
    drain_seconds: float = 60.0
    """how long running requests may go on after SIGTERM"""

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise ConfigError("--api-key is empty; give a key, or leave the option out")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be in [0, 65535]")
        for name in ("max_samples", "max_body_bytes", "request_seconds", "drain_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be > 0")
