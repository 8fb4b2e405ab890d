"""The trainer: packed batches in, new weights out. Imports nothing by itself, so that `learner.pack` needs no torch."""
