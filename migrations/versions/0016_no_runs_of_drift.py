"""runs that drift set off count as set off by failure cases"""

from alembic import op


revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.execute("UPDATE training_runs SET \"trigger\" = 'cases' WHERE \"trigger\" = 'drift'")


def downgrade() -> None:
    # Which of them drift had set off is not known any more; older releases read them as they are.
    pass
