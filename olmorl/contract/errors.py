"""Errors that cross a process boundary.

Workers raise only these: each carries one readable message and unpickles without torch, so the driver never
imports it by catching an exception.
"""


class OlmoRLError(Exception):
    """Base of every error this project raises on purpose. `exit_code` is what a command returns for it."""

    exit_code = 1


class ConfigError(OlmoRLError, ValueError):
    """The user asked for something impossible: a key, a value, a file, a model, a placement."""

    exit_code = 2


class DataError(ConfigError):
    """A data file is missing, empty, or lacks what is needed; the message names file and line or column."""


class ModelError(ConfigError):
    """A model folder is missing, unreadable, or of a family that is not supported."""


class PlacementError(ConfigError):
    """The cluster cannot hold the run; the message says what is missing."""


class WeightUpdateError(OlmoRLError):
    """A weight update was refused as a whole; the old weights keep serving."""


class SyncError(OlmoRLError):
    """The weight broadcast missed a deadline or broke; the message says who waited for whom."""


class ParityError(OlmoRLError):
    """Engine and learner give the same tokens different logprobs; the message names the worst and likely causes."""


class WorkerError(OlmoRLError):
    """An inference or learner worker failed at run time."""


class WorkerLostError(WorkerError):
    """A worker process died, or stayed silent beyond its deadline."""


class StarvationError(OlmoRLError):
    """The data cannot fill a batch with groups that carry signal."""
