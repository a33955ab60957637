"""several processes share a database; places in the log instead of moments; what rounds cost, by kind of machine"""

import sqlalchemy as sa
from alembic import op


revision = "0011"
down_revision = "0010"

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "members",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("token", sa.String(length=32), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("host", sa.String(length=256), nullable=False),
        sa.Column("machine", sa.String(length=256), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("target", sa.String(length=64), nullable=True),
        sa.Column("tokenizer", sa.String(length=64), nullable=True),
        sa.Column("draft", sa.String(length=64), nullable=True),
        sa.Column("trains", sa.Boolean(), nullable=False),
        sa.Column("erased", SERIAL, nullable=False),
        sa.Column("renewed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_members")),
        sa.UniqueConstraint("token", name=op.f("uq_members_token")),
        sqlite_autoincrement=True,
    )
    # A server of the version before may run: no other may start until it has ended.
    op.execute(
        "INSERT INTO members (token, role, host, machine, pid, trains, erased, renewed_at)"
        " SELECT token, 'server', host, machine, pid, true, 0, renewed_at FROM server_lease WHERE token IS NOT NULL"
    )
    op.drop_table("server_lease")
    op.create_table(
        "erasures",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("selection", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_erasures")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "round_costs",
        sa.Column("target", sa.String(length=64), nullable=False),
        sa.Column("tokenizer", sa.String(length=64), nullable=False),
        sa.Column("draft", sa.String(length=64), nullable=False),
        sa.Column("machine", sa.String(length=256), nullable=False),
        sa.Column("seconds", sa.Text(), nullable=False),
        sa.Column("more", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("target", "tokenizer", "draft", "machine", name=op.f("pk_round_costs")),
    )
    op.add_column("training_runs", sa.Column("owner", sa.String(length=32), nullable=True))
    op.add_column("training_runs", sa.Column("log_end", SERIAL, nullable=True))
    op.add_column("adapters", sa.Column("log_end", SERIAL, nullable=True))
    newest = "(SELECT max(g.seq) FROM generations g WHERE g.created_at <= {})"
    # Drift is counted from there, and a watch.
    op.execute(
        f"UPDATE training_runs SET log_end = {newest.format('training_runs.created_at')} WHERE \"trigger\" = 'drift'"
    )
    promoted = "(SELECT max(e.created_at) FROM evaluations e WHERE e.adapter = adapters.id AND e.kind = 'gate')"
    op.execute(f"UPDATE adapters SET log_end = {newest.format(promoted)} WHERE state = 'active'")


def downgrade() -> None:
    op.drop_column("adapters", "log_end")
    op.drop_column("training_runs", "log_end")
    op.drop_column("training_runs", "owner")
    op.drop_table("round_costs")
    op.drop_table("erasures")
    lease = op.create_table(
        "server_lease",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("token", sa.String(length=32), nullable=True),
        sa.Column("host", sa.String(length=256), nullable=True),
        sa.Column("machine", sa.String(length=256), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("renewed_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_server_lease")),
    )
    op.bulk_insert(lease, [{"id": 1}])
    op.drop_table("members")
