"""the watch's undecided comparisons are called interim checks"""

from alembic import op


revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.execute("UPDATE evaluations SET kind = 'interim' WHERE kind = 'look'")


def downgrade() -> None:
    op.execute("UPDATE evaluations SET kind = 'look' WHERE kind = 'interim'")
