"""runs end in states that say why; texts of runs without a verdict, and those quarantined for crashes, are free again"""

import sqlalchemy as sa
from alembic import op


revision = "0015"
down_revision = "0014"

INDEX, PAIR = "uq_training_runs_open", ["target", "tokenizer", "draft"]
BEFORE = ("promoted", "rejected", "failed", "crashed")
AFTER = ("promoted", "rejected", "failed", "out_of_memory", "timed_out", "ended", "lost", "crashed")
# What a crashed run's error said, as a pattern of LIKE.
STATES = (
    ("timed_out", "the child did not end within %"),
    ("out_of_memory", "the child ended with exit code -9"),
    ("out_of_memory", "the child was ended by signal 9"),
    ("out_of_memory", "training takes % GiB of memory and % GiB are free"),
    ("out_of_memory", "% GiB of the host''s memory are free, too little to train"),
    ("ended", "ended by an operator"),
    ("ended", "practice was turned off"),
    ("ended", "given up after % minutes of pauses: %"),
    ("ended", "the server was stopped"),
    ("ended", "the adapter that it was trained on top of was revoked"),
    ("ended", "a text that it had read was erased"),
    ("lost", "its process ended while it ran"),
    ("lost", "the server ended while it ran"),
    ("failed", "the child could not be started: %"),
    ("failed", "its child could not be started"),
    ("failed", "the engine could not load the candidate: %"),
)


def open_runs(over: tuple[str, ...]) -> None:
    """Let one run of each pair be open, which is in none of these states."""
    states = "', '".join(over)
    where = sa.text(f"state NOT IN ('{states}')")
    op.create_index(INDEX, "training_runs", PAIR, unique=True, sqlite_where=where, postgresql_where=where)


def upgrade() -> None:
    # Three runs over the same texts that crashed, timed out or were killed quarantined all of them. A text that does crash
    # runs is found anew.
    op.execute(
        "UPDATE generations SET quarantined_run = NULL WHERE quarantined_run IS NOT NULL"
        " AND quarantined_run NOT IN (SELECT id FROM training_runs WHERE state <> 'crashed')"
    )
    # These crashes are of other code: nobody is suspected of them.
    op.execute(
        "DELETE FROM run_texts WHERE role <> 'seed' AND run IN (SELECT id FROM training_runs WHERE state = 'crashed')"
    )
    op.drop_index(INDEX, "training_runs")
    for state, error in STATES:
        op.execute(
            f"UPDATE training_runs SET state = '{state}' WHERE state IN ('crashed', 'failed') AND error LIKE '{error}'"
        )
    open_runs(AFTER)


def downgrade() -> None:
    # Their texts are as if they had never had them: a crash would count against each.
    added = ", ".join(f"'{state}'" for state in AFTER if state not in BEFORE)
    op.execute(
        f"DELETE FROM run_texts WHERE role <> 'seed' AND run IN (SELECT id FROM training_runs WHERE state IN ({added}, 'failed'))"
    )
    op.drop_index(INDEX, "training_runs")
    op.execute(f"UPDATE training_runs SET state = 'crashed' WHERE state IN ({added})")
    open_runs(BEFORE)
