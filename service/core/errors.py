"""The errors that cross rooms."""

from __future__ import annotations


class RedraftError(Exception):
    """Base of every error a user may see. `code` is stable and machine-readable, the message is one sentence."""

    code = "internal_error"
    field: str | None = None


class BadRequest(RedraftError):
    """The request cannot be served as asked; `field` names what is wrong."""

    code = "bad_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NotFound(RedraftError):
    """There is nothing of this id."""

    code = "not_found"


class Conflict(RedraftError):
    """What is asked for does not go with the present state."""

    code = "conflict"


class Overloaded(RedraftError):
    """The queue is full; try again after `retry_after` seconds."""

    code = "overloaded"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(RedraftError):
    """Loading, draining, or the engine is dead. Where trying again helps, `retry_after` says in how many seconds."""

    code = "unavailable"

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelError(RedraftError):
    """A model cannot be found, read or used; the message says what to do."""

    code = "model_error"


class NonFiniteLogits(RedraftError):
    """The target computed NaN or infinite logits for a request, so that no token can be chosen. Other requests go on."""

    code = "nonfinite_logits"


class PairError(ModelError):
    """Target and draft do not belong together, or this engine cannot run one of them exactly."""

    code = "pair_refused"


class AdapterRefused(RedraftError):
    """An adapter folder is damaged, foreign, or of another shape. Nothing was changed."""

    code = "adapter_refused"


class TrainingFailed(RedraftError):
    """A run ended without a candidate; the message is the reason stored with it."""

    code = "training_failed"


class TrainingOutOfMemory(TrainingFailed):
    """A run does not fit into the memory that is free."""


class StoreError(RedraftError):
    """The database cannot be used as it is (wrong schema revision, damaged, not writable)."""

    code = "store_error"


class Outdated(StoreError):
    """A newer version has upgraded the database: this one does not write it any more."""

    code = "outdated"


class DatabaseTaken(StoreError):
    """Another server owns the database; the message names its process and host."""

    code = "database_taken"


class IllegalMove(StoreError):
    """A state change that RUN_MOVES or ADAPTER_MOVES does not allow, or with a stale fencing token."""

    code = "illegal_move"


class ParentChanged(IllegalMove):
    """The adapter that a candidate was compared with no longer serves."""
