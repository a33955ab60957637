"""grammars are stored with the tokens around the reasoning before them, so that their masks can be made again"""

import sqlalchemy as sa
from alembic import op


revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("grammars", sa.Column("opening", sa.Integer(), nullable=True))
    op.add_column("grammars", sa.Column("closing", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    # What the former release neither learns from nor measures on. A text's hash is now of these tokens too.
    op.execute("UPDATE generations SET split = 'constrained', cases = coalesce(cases, 0) WHERE grammar IS NOT NULL")
    with op.batch_alter_table("grammars") as batch_op:
        batch_op.drop_column("closing")
        batch_op.drop_column("opening")
