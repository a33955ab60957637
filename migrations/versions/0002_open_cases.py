"""open cases are counted from the index alone"""

from alembic import op


revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("failure_cases", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_failure_cases_trained_run_quarantined_tie_seq"))
        batch_op.create_index(
            batch_op.f("ix_failure_cases_trained_run_claimed_run_quarantined_tie_seq"),
            ["trained_run", "claimed_run", "quarantined", "tie", "seq"],
            unique=False,
        )


def downgrade() -> None:
    with op.batch_alter_table("failure_cases", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_failure_cases_trained_run_claimed_run_quarantined_tie_seq"))
        batch_op.create_index(
            batch_op.f("ix_failure_cases_trained_run_quarantined_tie_seq"),
            ["trained_run", "quarantined", "tie", "seq"],
            unique=False,
        )
