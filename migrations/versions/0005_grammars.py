"""answers within a grammar name it; what they teach is not learnt as long as its masks are not made again"""

import sqlalchemy as sa
from alembic import op


revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "grammars",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_grammars")),
    )
    op.add_column("generations", sa.Column("grammar", sa.String(length=64), nullable=True))
    op.create_index(op.f("ix_generations_grammar"), "generations", ["grammar"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_generations_grammar"), table_name="generations")
    with op.batch_alter_table("generations", table_kwargs={"sqlite_autoincrement": True}) as batch_op:
        batch_op.drop_column("grammar")
    op.drop_table("grammars")
