"""initial tables"""

import sqlalchemy as sa
from alembic import op


revision = "0001"
down_revision = None

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# service.store.columns.FreeText
TAG = sa.String(length=128).with_variant(sa.Text(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "generations",
        sa.Column("seq", SERIAL, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("prompt", sa.LargeBinary(), nullable=False),
        sa.Column("output", sa.LargeBinary(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("domain", TAG, nullable=True),
        sa.Column("client", TAG, nullable=True),
        sa.Column("first_user", sa.Text(), nullable=False),
        sa.Column("finish", sa.String(length=16), nullable=False),
        sa.Column("rounds", sa.Text(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("sampled_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("target", sa.String(length=64), nullable=False),
        sa.Column("tokenizer", sa.String(length=64), nullable=False),
        sa.Column("draft", sa.String(length=64), nullable=False),
        sa.Column("prompt_hash", sa.String(length=64), nullable=False),
        sa.Column("split", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_generations")),
        sa.UniqueConstraint("id", name=op.f("uq_generations_id")),
    )
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_generations_client"), ["client"], unique=False)
        batch_op.create_index(batch_op.f("ix_generations_domain"), ["domain"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_generations_target_tokenizer_split_seq"),
            ["target", "tokenizer", "split", "seq"],
            unique=False,
        )

    op.create_table(
        "replay_domains",
        sa.Column("domain", TAG, nullable=False),
        sa.Column("seen", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("domain", name=op.f("pk_replay_domains")),
    )
    op.create_table(
        "training_runs",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("trigger", sa.String(length=16), nullable=False),
        sa.Column("fencing", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.String(length=256), nullable=True),
        sa.Column("target", sa.String(length=64), nullable=False),
        sa.Column("tokenizer", sa.String(length=64), nullable=False),
        sa.Column("draft", sa.String(length=64), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=False),
        sa.Column("cases", sa.Integer(), nullable=False),
        sa.Column("generations", sa.Integer(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("progress", sa.Text(), nullable=False),
        sa.Column("loss_curve", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Integer(), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_training_runs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_training_runs_idempotency_key")),
    )
    with op.batch_alter_table("training_runs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_training_runs_state"), ["state"], unique=False)

    op.create_table(
        "adapters",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("scale", sa.Float(), nullable=False),
        sa.Column("keys", sa.Text(), nullable=False),
        sa.Column("draft", sa.String(length=64), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("note", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["training_runs.id"], name=op.f("fk_adapters_run_training_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
        sa.UniqueConstraint("folder", name=op.f("uq_adapters_folder")),
    )
    with op.batch_alter_table("adapters", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_adapters_draft_state"), ["draft", "state"], unique=False)

    op.create_table(
        "failure_cases",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("seq", SERIAL, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("drafted", sa.Integer(), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("p", sa.Float(), nullable=False),
        sa.Column("q", sa.Float(), nullable=False),
        sa.Column("margin", sa.Float(), nullable=False),
        sa.Column("tie", sa.Boolean(), nullable=False),
        sa.Column("claimed_run", sa.Integer(), nullable=True),
        sa.Column("trained_run", sa.Integer(), nullable=True),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("quarantined", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["claimed_run"],
            ["training_runs.id"],
            name=op.f("fk_failure_cases_claimed_run_training_runs"),
            ondelete="SET NULL",
        ),
        sa.ForeignKeyConstraint(
            ["seq"], ["generations.seq"], name=op.f("fk_failure_cases_seq_generations"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["trained_run"],
            ["training_runs.id"],
            name=op.f("fk_failure_cases_trained_run_training_runs"),
            ondelete="SET NULL",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_failure_cases")),
        sa.UniqueConstraint("seq", "position", name=op.f("uq_failure_cases_seq_position")),
    )
    with op.batch_alter_table("failure_cases", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_failure_cases_claimed_run"), ["claimed_run"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_failure_cases_trained_run_quarantined_tie_seq"),
            ["trained_run", "quarantined", "tie", "seq"],
            unique=False,
        )

    op.create_table(
        "generation_targets",
        sa.Column("seq", SERIAL, nullable=False),
        sa.Column("top", sa.Integer(), nullable=False),
        sa.Column("blob", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["seq"], ["generations.seq"], name=op.f("fk_generation_targets_seq_generations"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_generation_targets")),
    )
    op.create_table(
        "replay_buffer",
        sa.Column("domain", TAG, nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("seq", SERIAL, nullable=False),
        sa.ForeignKeyConstraint(
            ["seq"], ["generations.seq"], name=op.f("fk_replay_buffer_seq_generations"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("domain", "slot", name=op.f("pk_replay_buffer")),
    )
    with op.batch_alter_table("replay_buffer", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_replay_buffer_seq"), ["seq"], unique=False)

    op.create_table(
        "evaluations",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("adapter", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["adapter"], ["adapters.id"], name=op.f("fk_evaluations_adapter_adapters")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
    )
    with op.batch_alter_table("evaluations", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_evaluations_adapter_kind"), ["adapter", "kind"], unique=False)



def downgrade() -> None:
    with op.batch_alter_table("evaluations", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_evaluations_adapter_kind"))

    op.drop_table("evaluations")
    with op.batch_alter_table("replay_buffer", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_replay_buffer_seq"))

    op.drop_table("replay_buffer")
    op.drop_table("generation_targets")
    with op.batch_alter_table("failure_cases", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_failure_cases_trained_run_quarantined_tie_seq"))
        batch_op.drop_index(batch_op.f("ix_failure_cases_claimed_run"))

    op.drop_table("failure_cases")
    with op.batch_alter_table("adapters", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_adapters_draft_state"))

    op.drop_table("adapters")
    with op.batch_alter_table("training_runs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_training_runs_state"))

    op.drop_table("training_runs")
    op.drop_table("replay_domains")
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_generations_target_tokenizer_split_seq"))
        batch_op.drop_index(batch_op.f("ix_generations_domain"))
        batch_op.drop_index(batch_op.f("ix_generations_client"))

    op.drop_table("generations")
