"""what adapters were measured to gain against the base draft"""

import sqlalchemy as sa
from alembic import op


revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "gains",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("adapter", sa.Integer(), sa.ForeignKey("adapters.id"), nullable=False),
        sa.Column("figures", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("ix_gains_adapter", "gains", ["adapter"])


def downgrade() -> None:
    op.drop_table("gains")
