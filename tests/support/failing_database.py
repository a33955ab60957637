"""A real database whose n-th write fails."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from sqlalchemy import Connection

from service.store.database import Database

T = TypeVar("T")


class Killed(BaseException):
    """Stands for kill -9: no code of the server handles it."""


class FailingDatabase(Database):
    """Raises at its n-th write after `arm`, before or after the commit: Killed, or the given error."""

    writes_left: int | None = None
    after = False
    error: BaseException = Killed()

    def arm(self, writes: int, *, after: bool = False, error: BaseException | None = None) -> None:
        self.writes_left, self.after, self.error = writes, after, error or Killed()

    def write(
        self,
        work: Callable[[Connection], T],
        *,
        urgent: bool = True,
        scrub: bool = False,
        shared: bool = False,
        by_member: bool = True,
    ) -> Future[T]:
        def write() -> Future[T]:
            return super(FailingDatabase, self).write(
                work, urgent=urgent, scrub=scrub, shared=shared, by_member=by_member
            )

        if self.writes_left is not None and not scrub:  # when purges run depends on the time
            self.writes_left -= 1
            if self.writes_left == 0:
                if self.after:
                    write().result()
                raise self.error
        return write()
