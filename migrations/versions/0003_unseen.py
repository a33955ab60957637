"""generations that no draft was tried on wait for their cases"""

import sqlalchemy as sa
from alembic import op


revision = "0003"
down_revision = "0002"

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "unseen",
        sa.Column("seq", SERIAL, nullable=False),
        sa.ForeignKeyConstraint(
            ["seq"], ["generations.seq"], name=op.f("fk_unseen_seq_generations"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_unseen")),
    )


def downgrade() -> None:
    op.drop_table("unseen")
