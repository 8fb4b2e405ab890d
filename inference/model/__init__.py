"""The decoder: one definition for every supported family."""
