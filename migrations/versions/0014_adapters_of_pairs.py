"""an adapter is of one target, and one serves each pair of target and draft"""

import sqlalchemy as sa
from alembic import op


revision = "0014"
down_revision = "0013"

ACTIVE = sa.text("state = 'active'")


def upgrade() -> None:
    op.add_column("adapters", sa.Column("target", sa.String(length=64), nullable=True))
    op.execute("UPDATE adapters SET target = (SELECT target FROM training_runs WHERE training_runs.id = adapters.run)")
    op.drop_index("uq_adapters_active", "adapters")
    op.create_index(
        "uq_adapters_active",
        "adapters",
        ["target", "draft"],
        unique=True,
        sqlite_where=ACTIVE,
        postgresql_where=ACTIVE,
    )


def downgrade() -> None:
    # One serves a draft, whatever the target: the newest.
    op.execute(
        "UPDATE adapters SET state = 'retired' WHERE state = 'active' AND EXISTS (SELECT 1 FROM adapters AS newer"
        " WHERE newer.state = 'active' AND newer.draft = adapters.draft AND newer.id > adapters.id)"
    )
    op.drop_index("uq_adapters_active", "adapters")
    op.create_index(
        "uq_adapters_active", "adapters", ["draft"], unique=True, sqlite_where=ACTIVE, postgresql_where=ACTIVE
    )
    op.drop_column("adapters", "target")
