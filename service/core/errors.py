"""The errors that cross package boundaries."""

from __future__ import annotations


class RedraftError(Exception):
    """Base class of every error that users may see. `code` is stable and machine-readable, the message is one sentence."""

    code = "internal_error"
    field: str | None = None


class BadRequest(RedraftError):
    """The request cannot be served as it is; `field` names what is wrong."""

    code = "bad_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NotFound(RedraftError):
    """There is nothing with this id."""

    code = "not_found"


class Conflict(RedraftError):
    """The request conflicts with the current state."""

    code = "conflict"


class Overloaded(RedraftError):
    """The queue is full; try again after `retry_after` seconds."""

    code = "overloaded"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(RedraftError):
    """Loading, draining, or the engine has died. `retry_after`: seconds after which trying again may help."""

    code = "unavailable"

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelError(RedraftError):
    """A model cannot be found, read or used; the message says what to do."""

    code = "model_error"


class NonFiniteLogits(RedraftError):
    """The target computed NaN or infinite logits for a request, so no token can be chosen. Other requests continue."""

    code = "nonfinite_logits"


class PairError(ModelError):
    """Target and draft do not fit together, or this engine cannot run one of them exactly."""

    code = "pair_refused"


class AdapterRefused(RedraftError):
    """An adapter folder is damaged, belongs to another draft, or has the wrong shape. Nothing was changed."""

    code = "adapter_refused"


class TrainingFailed(RedraftError):
    """A run ended without a candidate; the message is the reason stored with it."""

    code = "training_failed"


class TrainingOutOfMemory(TrainingFailed):
    """A run does not fit into the free memory."""


class StoreError(RedraftError):
    """The database cannot be used as it is (wrong schema revision, damaged, not writable)."""

    code = "store_error"


class Outdated(StoreError):
    """A newer version has upgraded the database; this version no longer writes to it."""

    code = "outdated"


class DatabaseTaken(StoreError):
    """Another server owns the database; the message names its process and host."""

    code = "database_taken"


class IllegalMove(StoreError):
    """A state change that RUN_MOVES or ADAPTER_MOVES does not allow, or with a stale fencing token."""

    code = "illegal_move"


class ParentChanged(IllegalMove):
    """The adapter that a candidate was compared with no longer serves."""
