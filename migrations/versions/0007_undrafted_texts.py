"""undrafted texts are those whose cases are not known, without a queue of their own"""

import sqlalchemy as sa
from alembic import op


revision = "0007"
down_revision = "0006"

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.execute("UPDATE generations SET cases = NULL WHERE seq IN (SELECT seq FROM unseen)")
    op.drop_table("unseen")


def downgrade() -> None:
    op.create_table(
        "unseen",
        sa.Column("seq", SERIAL, nullable=False),
        sa.ForeignKeyConstraint(
            ["seq"], ["generations.seq"], name=op.f("fk_unseen_seq_generations"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_unseen")),
    )
    op.execute("INSERT INTO unseen (seq) SELECT seq FROM generations WHERE cases IS NULL")
    op.execute(
        "UPDATE generations SET cases = (SELECT count(*) FROM failure_cases c WHERE c.seq = generations.seq AND NOT c.tie)"
        " WHERE cases IS NULL"
    )
