"""Rollouts without training: prompts in, samples of a model out, scored if asked. No torch."""
