"""Prompts: read from files, tokenised once, served in a reproducible order. No torch."""
