"""An operator's choice about practice, kept across restarts."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from pydantic import BaseModel, StrictBool

from service.core import Conflict, Unavailable
from service.settings import TrainingSettings
from service.store.permissions import private_folder

log = logging.getLogger(__name__)

FILE = "practice.json"
"""File name in the home folder."""
CONFIGURED = "training.practice is set in the configuration"


class _Stored(BaseModel):
    """The file's content."""

    on: StrictBool


class PracticeChoice:
    """Whether practice starts automatically here: `training.practice` if it is set, otherwise the operator's choice,
    otherwise off. The choice is a file in the home folder that is read once; other processes see a change at their next
    start."""

    def __init__(self, training: TrainingSettings, home: Path) -> None:
        self.configured = "practice" in training.model_fields_set
        """Whether the configuration sets it, so that there is nothing to choose."""
        self._path = home / FILE
        self._on = training.practice if self.configured else self._read()

    @property
    def on(self) -> bool:
        """Whether practice starts automatically."""
        return self._on is True

    @property
    def open(self) -> bool:
        """Whether neither the configuration nor an operator has decided."""
        return self._on is None

    def make(self, on: bool) -> None:
        """Stores the choice, also for later starts. Raises Conflict when the configuration decides, Unavailable when
        the file cannot be written; nothing has changed then."""
        if self.configured:
            raise Conflict(CONFIGURED)
        try:
            self._write(_Stored(on=on))
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be written: {error.strerror or error}") from error
        self._on = on

    def _read(self) -> bool | None:
        try:
            return _Stored.model_validate_json(self._path.read_bytes()).on
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            log.warning("%s cannot be read or is damaged: practice is off until it is chosen again", self._path)
            return None

    def _write(self, stored: _Stored) -> None:
        """Writes the file atomically, readable only by this user. Raises OSError."""
        private_folder(self._path.parent)
        with NamedTemporaryFile(dir=self._path.parent, prefix=f".{FILE}.", suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                file.write(stored.model_dump_json().encode())
                file.flush()
                os.fsync(file.fileno())
                part.replace(self._path)
            except OSError:
                part.unlink(missing_ok=True)
                raise
