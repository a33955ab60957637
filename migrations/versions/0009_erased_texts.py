"""adapters say how many texts they learnt from that were erased since"""

import sqlalchemy as sa
from alembic import op


revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("adapters", sa.Column("erased_texts", sa.Integer(), nullable=True))


def downgrade() -> None:
    # Earlier versions know no revoked adapters; these never serve either.
    op.execute("UPDATE adapters SET state = 'broken' WHERE state = 'revoked'")
    with op.batch_alter_table("adapters", schema=None) as batch_op:
        batch_op.drop_column("erased_texts")
