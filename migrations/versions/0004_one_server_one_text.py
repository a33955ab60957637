"""one server a database, one row a text, numbers that are never reused, clients' tags apart from kinds of prompts"""

import hashlib
import json
import re

import sqlalchemy as sa
from alembic import op


revision = "0004"
down_revision = "0003"

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# service.store.columns.FreeText
TAG = sa.String(length=128).with_variant(sa.Text(), "postgresql")
CLUSTER = re.compile(r"cluster:[0-9a-f]{16}")


def upgrade() -> None:
    connection = op.get_bind()
    op.add_column("generations", sa.Column("text_key", sa.String(length=64), nullable=True))
    op.add_column("generations", sa.Column("copies", sa.Integer(), nullable=True))
    _fill_text_keys(connection)
    sqlite = connection.dialect.name == "sqlite"
    # AUTOINCREMENT is part of the table in SQLite, which is made anew for it; elsewhere sequences never go back.
    with op.batch_alter_table(
        "generations",
        schema=None,
        recreate="always" if sqlite else "auto",
        table_kwargs={"sqlite_autoincrement": True},
    ) as batch_op:
        batch_op.alter_column("text_key", existing_type=sa.String(length=64), nullable=False)
        batch_op.alter_column("copies", existing_type=sa.Integer(), nullable=False)
        batch_op.create_index(batch_op.f("ix_generations_text_key"), ["text_key"], unique=False)

    _split_replay(connection)

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


def _fill_text_keys(connection: sa.Connection) -> None:
    """As store.log.rows.text_key has it. Copies that are there already keep their rows and grow old."""
    generations = sa.table(
        "generations",
        *(sa.column(name) for name in ("seq", "prompt", "output", "rounds", "target", "tokenizer", "draft")),
        sa.column("text_key"),
        sa.column("copies"),
    )
    last = None
    while True:
        page = sa.select(generations).order_by(generations.c.seq).limit(500)
        rows = connection.execute(page if last is None else page.where(generations.c.seq > last)).all()
        for row in rows:
            rounds = json.loads(row.rounds)
            adapter = rounds[-1][0] if rounds else 0
            digest = hashlib.sha256(f"{row.target} {row.tokenizer} {row.draft} {adapter} {len(row.prompt)} ".encode())
            digest.update(row.prompt)
            digest.update(row.output)
            connection.execute(
                sa.update(generations)
                .where(generations.c.seq == row.seq)
                .values(text_key=digest.hexdigest(), copies=1)
            )
        if not rows:
            return
        last = rows[-1].seq


def _split_replay(connection: sa.Connection) -> None:
    """One name per reservoir becomes the clients' tag or a kind of prompts. A text without a tag lay in its kind's; an empty
    reservoir is a kind's where it is named like one."""
    held = connection.execute(
        sa.text(
            "SELECT r.domain, r.slot, r.seq, g.domain AS tag FROM replay_buffer r JOIN generations g ON g.seq = r.seq"
        )
    ).all()
    seen = dict(connection.execute(sa.text("SELECT domain, seen FROM replay_domains")).all())

    def place(name: str, untagged: bool) -> tuple[str, str]:
        return ("", name) if untagged and CLUSTER.fullmatch(name) else (name, "")

    buffer_rows = [
        dict(zip(("domain", "kind"), place(row.domain, row.tag is None), strict=True)) | {"slot": row.slot, "seq": row.seq}
        for row in held
    ]
    places = {(row["domain"], row["kind"]) for row in buffer_rows}
    known = {name for pair in places for name in pair if name}
    places |= {place(name, True) for name in seen if name not in known}
    reservoirs = [{"domain": tag, "kind": kind, "seen": seen.get(tag or kind, 0)} for tag, kind in sorted(places)]
    _make_replay(("domain", "kind"), buffer_rows, reservoirs)


def _make_replay(name: tuple[str, ...], buffer_rows: list[dict], reservoirs: list[dict]) -> None:
    """Both tables anew. name: the columns that name a reservoir."""
    op.drop_table("replay_buffer")
    op.drop_table("replay_domains")
    held = op.create_table(
        "replay_buffer",
        *(sa.Column(column, TAG if column == "domain" else sa.String(length=128), nullable=False) for column in name),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("seq", SERIAL, nullable=False),
        sa.ForeignKeyConstraint(
            ["seq"], ["generations.seq"], name=op.f("fk_replay_buffer_seq_generations"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint(*name, "slot", name=op.f("pk_replay_buffer")),
    )
    op.create_index(op.f("ix_replay_buffer_seq"), "replay_buffer", ["seq"], unique=False)
    domains = op.create_table(
        "replay_domains",
        *(sa.Column(column, TAG if column == "domain" else sa.String(length=128), nullable=False) for column in name),
        sa.Column("seen", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint(*name, name=op.f("pk_replay_domains")),
    )
    op.bulk_insert(held, buffer_rows)
    op.bulk_insert(domains, reservoirs)


def downgrade() -> None:
    connection = op.get_bind()
    op.drop_table("server_lease")
    # Where a tag and a kind share a name, the old tables have room for one: the tag's.
    held = connection.execute(sa.text("SELECT domain, kind, slot, seq FROM replay_buffer ORDER BY kind")).all()
    seen = connection.execute(sa.text("SELECT domain, kind, seen FROM replay_domains ORDER BY kind")).all()
    buffer_rows: dict[tuple[str, int], dict] = {}
    for row in held:
        name = row.domain or row.kind
        buffer_rows.setdefault((name, row.slot), {"domain": name, "slot": row.slot, "seq": row.seq})
    reservoirs: dict[str, dict] = {}
    for row in seen:
        name = row.domain or row.kind
        reservoirs.setdefault(name, {"domain": name, "seen": row.seen})
    _make_replay(("domain",), list(buffer_rows.values()), list(reservoirs.values()))
    # Made anew without AUTOINCREMENT, which reflection does not see.
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_generations_text_key"))
        batch_op.drop_column("copies")
        batch_op.drop_column("text_key")
