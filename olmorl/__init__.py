"""OlmoRL: reinforcement learning for language models, built around generating rollouts."""

__version__ = "0.1.0"
