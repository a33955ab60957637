"""API keys, sessions of the page, and the key that a generation was asked for with"""

import sqlalchemy as sa
from alembic import op


revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_keys_hash")),
    )
    op.create_table(
        "page_sessions",
        sa.Column("hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_page_sessions")),
    )
    op.add_column("generations", sa.Column("api_key", sa.String(length=64), nullable=True))
    op.create_index("ix_generations_api_key", "generations", ["api_key"])


def downgrade() -> None:
    op.drop_index("ix_generations_api_key", "generations")
    op.drop_column("generations", "api_key")
    op.drop_table("page_sessions")
    op.drop_table("api_keys")
