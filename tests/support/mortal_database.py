"""A real database that fails when a test wants it to."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from sqlalchemy import Connection

from service.store.database import Database

T = TypeVar("T")


class Death(BaseException):
    """The server dies here: nothing of it runs any more."""


class MortalDatabase(Database):
    """At its n-th write (counted from `arm`) the server dies, before or after the commit, or only that write fails."""

    fuse: int | None = None
    after = False
    error: BaseException = Death()

    def arm(self, writes: int, *, after: bool = False, error: BaseException | None = None) -> None:
        self.fuse, self.after, self.error = writes, after, error or Death()

    def write(self, work: Callable[[Connection], T], *, urgent: bool = True, scrub: bool = False) -> Future[T]:
        if self.fuse is not None and not scrub:  # purges come with time, not with the circle
            self.fuse -= 1
            if self.fuse == 0:
                if self.after:
                    super().write(work, urgent=urgent, scrub=scrub).result()
                raise self.error
        return super().write(work, urgent=urgent, scrub=scrub)
