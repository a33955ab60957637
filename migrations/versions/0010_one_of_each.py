"""at most one open run of a target, tokenizer and draft, and one active adapter of a draft"""

import sqlalchemy as sa
from alembic import op


revision = "0010"
down_revision = "0009"

OPEN = "state NOT IN ('promoted', 'rejected', 'failed', 'crashed')"
ACTIVE = "state = 'active'"


def upgrade() -> None:
    # Nobody runs them: of two open runs the older one was left behind. Its texts are free, and not suspected of its end.
    stale = (
        f"{OPEN} AND EXISTS (SELECT 1 FROM training_runs n WHERE n.{OPEN} AND n.id > training_runs.id"
        " AND n.target = training_runs.target AND n.tokenizer = training_runs.tokenizer AND n.draft = training_runs.draft)"
    )
    op.execute(f"DELETE FROM run_texts WHERE run IN (SELECT id FROM training_runs WHERE {stale})")
    op.execute(
        "UPDATE training_runs SET state = 'crashed', error = 'another run of the same draft was open',"
        f" finished_at = CURRENT_TIMESTAMP WHERE {stale}"
    )
    op.execute(
        f"UPDATE adapters SET state = 'retired' WHERE {ACTIVE} AND EXISTS"
        f" (SELECT 1 FROM adapters n WHERE n.{ACTIVE} AND n.id > adapters.id AND n.draft = adapters.draft)"
    )
    for name, table, columns, where in (
        ("uq_training_runs_open", "training_runs", ["target", "tokenizer", "draft"], OPEN),
        ("uq_adapters_active", "adapters", ["draft"], ACTIVE),
    ):
        op.create_index(
            name, table, columns, unique=True, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
        )


def downgrade() -> None:
    op.drop_index("uq_adapters_active", table_name="adapters")
    op.drop_index("uq_training_runs_open", table_name="training_runs")
