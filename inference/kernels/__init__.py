"""Compiled fast paths. Each has a slow twin in torch that says what it must compute."""
