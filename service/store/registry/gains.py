"""Measured gains of adapters over the base draft."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import Connection, insert, select

from service.core import MeasuredGain
from service.store.database import Database
from service.store.tables import gains
from service.store.times import time_of, utc


class Gains:
    """The measured gains of a database. Writes wait until they are committed."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def record(self, adapter: int, gain: MeasuredGain) -> None:
        """Add a measurement of an adapter."""

        def work(connection: Connection) -> None:
            row = {"adapter": adapter, "figures": json.dumps(asdict(gain)), "created_at": time_of(connection)}
            connection.execute(insert(gains).values(row))

        self._db.write(work).result()

    def newest(self, adapter: int) -> tuple[datetime, MeasuredGain] | None:
        """The newest measurement of an adapter and its time, or None."""
        query = select(gains).where(gains.c.adapter == adapter).order_by(gains.c.id.desc()).limit(1)
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        figures = json.loads(row.figures)
        speed = figures.pop("speed_gain")
        return utc(row.created_at), MeasuredGain(**figures, speed_gain=speed and tuple(speed))
