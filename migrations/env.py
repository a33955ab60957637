"""How Alembic reaches the database: the URL comes from the caller's Config, nothing from files or the environment.

An upgrade is one transaction, tables and all: killed at any moment it leaves the old revision, and a second one that was
started meanwhile waits and then finds nothing to do.
"""

import sqlite3

from alembic import context
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

from service.store.backends import postgres
from service.store.backends.backend import sqlite_path
from service.store.tables import metadata

config = context.config


def begin_at_once(engine: Engine) -> None:
    """SQLite's driver would commit every table by itself."""

    @event.listens_for(engine, "connect")
    def leave_transactions_to_us(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None
        # What a table that is copied leaves behind holds texts.
        connection.execute("PRAGMA secure_delete=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def run() -> None:
    url = config.get_main_option("sqlalchemy.url") or ""
    sqlite = sqlite_path(url) is not None
    engine = create_engine(url) if sqlite else postgres.make_engine(url, NullPool)
    if sqlite:
        begin_at_once(engine)
    try:
        with engine.connect() as connection:
            # SQLite cannot alter most things in place: batch mode copies the table.
            context.configure(
                connection=connection, target_metadata=metadata, render_as_batch=True, transactional_ddl=True
            )
            with context.begin_transaction():
                if not sqlite:
                    postgres.begin_migration(connection)
                context.run_migrations()
    finally:
        engine.dispose()


run()
