"""Environments: what a model can talk to for several turns before its answer is judged."""

from olmorl.environments.environment import Environment, Reply

__all__ = ["Environment", "Reply"]
