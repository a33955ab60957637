"""runs name the texts they learn from; what a run has had, and what is put aside, goes by generation"""

import sqlalchemy as sa
from alembic import op


revision = "0006"
down_revision = "0005"

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "run_texts",
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("seq", SERIAL, nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["training_runs.id"], name=op.f("fk_run_texts_run_training_runs")),
        sa.ForeignKeyConstraint(
            ["seq"], ["generations.seq"], name=op.f("fk_run_texts_seq_generations"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "seq", name=op.f("pk_run_texts")),
    )
    op.create_index(op.f("ix_run_texts_seq"), "run_texts", ["seq"], unique=False)
    op.add_column("generations", sa.Column("cases", sa.Integer(), nullable=True))
    op.add_column("generations", sa.Column("quarantined_run", sa.Integer(), nullable=True))
    op.execute(
        "INSERT INTO run_texts (run, seq, role) SELECT DISTINCT trained_run, seq, 'new' FROM failure_cases"
        " WHERE trained_run IS NOT NULL"
    )
    op.execute(
        "INSERT INTO run_texts (run, seq, role) SELECT DISTINCT claimed_run, seq, 'new' FROM failure_cases c"
        " WHERE claimed_run IS NOT NULL AND NOT EXISTS"
        " (SELECT 1 FROM run_texts t WHERE t.run = c.claimed_run AND t.seq = c.seq)"
    )
    op.execute(
        "UPDATE generations SET cases = (SELECT count(*) FROM failure_cases c WHERE c.seq = generations.seq AND NOT c.tie)"
    )
    # What runs crashed over was counted by case and names no run: the newest that crashed answers for it.
    op.execute(
        "UPDATE generations SET quarantined_run = (SELECT coalesce(max(c.trained_run),"
        " (SELECT max(id) FROM training_runs WHERE state = 'crashed'), 0)"
        " FROM failure_cases c WHERE c.seq = generations.seq AND c.quarantined)"
        " WHERE EXISTS (SELECT 1 FROM failure_cases c WHERE c.seq = generations.seq AND c.quarantined)"
    )
    # Runs could offer texts for replay and crash then; those that were put aside for it stayed there.
    op.execute(
        "DELETE FROM replay_buffer WHERE seq IN (SELECT seq FROM generations WHERE quarantined_run IS NOT NULL)"
    )
    op.drop_index(op.f("ix_generations_target_tokenizer_split_seq"), table_name="generations")
    op.create_index(
        "ix_generations_open",
        "generations",
        ["target", "tokenizer", "split", "seq", "cases", "quarantined_run", "output_tokens"],
        unique=False,
    )
    with op.batch_alter_table("failure_cases", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_failure_cases_claimed_run"))
        batch_op.drop_index(batch_op.f("ix_failure_cases_trained_run_claimed_run_quarantined_tie_seq"))
        batch_op.drop_constraint(batch_op.f("fk_failure_cases_claimed_run_training_runs"), type_="foreignkey")
        batch_op.drop_constraint(batch_op.f("fk_failure_cases_trained_run_training_runs"), type_="foreignkey")
        batch_op.drop_column("claimed_run")
        batch_op.drop_column("trained_run")
        batch_op.drop_column("crashes")
        batch_op.drop_column("quarantined")


def downgrade() -> None:
    with op.batch_alter_table("failure_cases", schema=None) as batch_op:
        batch_op.add_column(sa.Column("claimed_run", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("trained_run", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("crashes", sa.Integer(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("quarantined", sa.Boolean(), server_default=sa.false(), nullable=False))
        for name in ("claimed_run", "trained_run"):
            batch_op.create_foreign_key(
                batch_op.f(f"fk_failure_cases_{name}_training_runs"),
                "training_runs",
                [name],
                ["id"],
                ondelete="SET NULL",
            )
    over = "('promoted', 'rejected', 'failed', 'crashed')"
    mine = "t.seq = failure_cases.seq AND t.role = 'new'"
    op.execute(
        f"UPDATE failure_cases SET claimed_run = (SELECT max(t.run) FROM run_texts t JOIN training_runs r ON r.id = t.run"
        f" WHERE {mine} AND r.state NOT IN {over}), trained_run = (SELECT max(t.run) FROM run_texts t JOIN training_runs r"
        f" ON r.id = t.run WHERE {mine} AND r.state IN {over} AND r.state <> 'crashed'), quarantined ="
        " (SELECT g.quarantined_run IS NOT NULL FROM generations g WHERE g.seq = failure_cases.seq), crashes ="
        f" (SELECT count(*) FROM run_texts t JOIN training_runs r ON r.id = t.run WHERE {mine} AND r.state = 'crashed')"
    )
    with op.batch_alter_table("failure_cases", schema=None) as batch_op:
        batch_op.alter_column("crashes", existing_type=sa.Integer(), server_default=None)
        batch_op.alter_column("quarantined", existing_type=sa.Boolean(), server_default=None)
        batch_op.create_index(batch_op.f("ix_failure_cases_claimed_run"), ["claimed_run"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_failure_cases_trained_run_claimed_run_quarantined_tie_seq"),
            ["trained_run", "claimed_run", "quarantined", "tie", "seq"],
            unique=False,
        )
    op.drop_index("ix_generations_open", table_name="generations")
    with op.batch_alter_table("generations", table_kwargs={"sqlite_autoincrement": True}) as batch_op:
        batch_op.drop_column("quarantined_run")
        batch_op.drop_column("cases")
        batch_op.create_index(
            batch_op.f("ix_generations_target_tokenizer_split_seq"),
            ["target", "tokenizer", "split", "seq"],
            unique=False,
        )
    op.drop_table("run_texts")
