"""Environments in a verifier process: a turn of an episode is a job like any other, killed at its deadline.

An environment's state lives in no process. Each job brings all turns so far and they are played again, so that any
process can take it, also after the one before was killed.
"""

import json
import math
import numbers
from typing import Any

from olmorl.environments.environment import MAX_TURNS, Reply
from olmorl.rewards.verdict import Verdict, VerifierJob


class EpisodePlayer:
    """Stands in the registry for an environment class."""

    def __init__(self, environment: type) -> None:
        self._environment: Any = environment

    def play(self, job: VerifierJob) -> Verdict:
        """The rewards of all turns, and the observation that follows the last. Without turns: how to play."""
        assert job.episode is not None, "not a turn of an episode"
        if not job.episode.turns:
            return Verdict(status="scored", reward=0.0, observation=json.dumps(self._rules()))
        environment = self._environment(prompt=job.prompt or "", ground_truth=job.ground_truth, seed=job.episode.seed)
        total, observation = 0.0, None
        for turn in job.episode.turns:
            reply = environment.step(turn)
            if (problem := _find_problem(reply)) is not None:
                return Verdict(status="error", detail=f"the environment returned {reply!r:.200}; {problem}")
            total += float(reply.reward)
            observation = reply.observation
        return Verdict(status="scored", reward=total, observation=observation)

    def __call__(self, completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
        return Verdict(status="error", detail=f"{self._environment.__name__} is an environment, not a verifier")

    def _rules(self) -> dict[str, object]:
        stop = getattr(self._environment, "stop", ())
        return {
            "stop": [stop] if isinstance(stop, str) else list(stop),
            "max_turns": getattr(self._environment, "max_turns", MAX_TURNS),
        }


def is_environment(target: object) -> bool:
    """A class with `step` whose instances cannot be called."""
    return (
        isinstance(target, type)
        and callable(getattr(target, "step", None))
        and not any("__call__" in parent.__dict__ for parent in target.__mro__)
    )


def _find_problem(reply: object) -> str | None:
    if not isinstance(reply, Reply):
        return "it must be a Reply"
    if reply.observation is not None and not isinstance(reply.observation, str):
        return "its observation must be text or None"
    if reply.observation is not None and not _is_unicode(reply.observation):
        return "its observation must be text that UTF-8 can write"
    if not isinstance(reply.reward, numbers.Real) or not math.isfinite(reply.reward):
        return "its reward must be a finite number"
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True
