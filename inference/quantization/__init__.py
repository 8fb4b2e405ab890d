"""Weights in fewer bits: how they are stored, and what a product with them means."""
