"""How Alembic reaches the database: the URL comes from the caller's Config, nothing from files or the environment."""

from alembic import context
from sqlalchemy import create_engine

from service.store.tables import metadata

config = context.config


def run() -> None:
    engine = create_engine(config.get_main_option("sqlalchemy.url") or "")
    try:
        with engine.connect() as connection:
            # SQLite cannot alter most things in place: batch mode copies the table.
            context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
            with context.begin_transaction():
                context.run_migrations()
    finally:
        engine.dispose()


run()
