"""The tables. Alembic's migrations create them; a test compares the two."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from service.core import AdapterState, RunState
from service.store.columns import FreeText, Serial

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
metadata = MetaData(naming_convention=NAMING)

_over = "', '".join(state for state in RunState if state.over)
OPEN_RUN = text(f"state NOT IN ('{_over}')")
ACTIVE = text(f"state = '{AdapterState.ACTIVE}'")


generations = Table(
    "generations",
    metadata,
    Column("seq", Serial, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("prompt", LargeBinary, nullable=False),
    Column("output", LargeBinary, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("domain", FreeText(128)),
    Column("client", FreeText(128)),
    Column("api_key", String(64)),
    Column("first_user", FreeText, nullable=False),
    Column("finish", String(16), nullable=False),
    Column("rounds", Text, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("sampled_logprobs", LargeBinary, nullable=False),
    Column("target", String(64), nullable=False),
    Column("tokenizer", String(64), nullable=False),
    Column("draft", String(64), nullable=False),
    Column("prompt_hash", String(64), nullable=False),
    Column("split", String(16), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("text_key", String(64), nullable=False),
    Column("copies", Integer, nullable=False),
    Column("grammar", String(64)),
    Column("cases", Integer),
    Column("quarantined_run", Integer),
    Index("ix_generations_open", "target", "tokenizer", "split", "seq", "cases", "quarantined_run", "output_tokens"),
    Index(None, "client"),
    Index(None, "api_key"),
    Index(None, "domain"),
    Index(None, "text_key"),
    Index(None, "grammar"),
    # Otherwise SQLite would reuse the number of an erased row.
    sqlite_autoincrement=True,
)
"""prompt, output: token ids, little-endian uint32. logprobs: float32. text_key: rows.text_key. copies: how often the
text was generated, including this row. grammar: hash of the answer's grammar, whose text is in grammars. api_key: name
of the key it was requested with. cases: number of its failure cases without near-ties; null: unknown, because hardly
any of it was drafted. quarantined_run: the run that quarantined it, because its adapter was rolled back or because it
was the last run that crashed on the text. The last two have no foreign keys, which SQLite could only add by rewriting
the table."""

api_keys = Table(
    "api_keys",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("hash", LargeBinary(32), nullable=False, unique=True),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("revoked_at", DateTime(timezone=True)),
)
"""hash: SHA-256 of the key. Rows of revoked keys are kept, so that no name is reused and a server that had keys keeps
requiring one."""

page_sessions = Table(
    "page_sessions",
    metadata,
    Column("hash", LargeBinary(32), primary_key=True),
    Column("key_hash", LargeBinary(32), nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
)
"""Sessions of the page. hash: SHA-256 of the session's secret. key_hash: of the key that opened it."""

grammars = Table(
    "grammars",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("text", FreeText, nullable=False),
    Column("opening", Integer),
    Column("closing", LargeBinary),
)
"""core.AnswerGrammar. hash: rows.grammar_hash. closing: token ids, little-endian uint32; null: none."""

generation_targets = Table(
    "generation_targets",
    metadata,
    Column("seq", ForeignKey("generations.seq", ondelete="CASCADE"), primary_key=True),
    Column("top", Integer, nullable=False),
    Column("blob", LargeBinary, nullable=False),
)
"""blob: core.Targets' ids, logprobs and tail, concatenated."""

failure_cases = Table(
    "failure_cases",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("seq", ForeignKey("generations.seq", ondelete="CASCADE"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("drafted", Integer, nullable=False),
    Column("target", Integer, nullable=False),
    Column("p", Float, nullable=False),
    Column("q", Float, nullable=False),
    Column("margin", Float, nullable=False),
    Column("tie", Boolean, nullable=False),
    UniqueConstraint("seq", "position"),
)

replay_buffer = Table(
    "replay_buffer",
    metadata,
    Column("domain", FreeText(128), primary_key=True),
    Column("kind", String(128), primary_key=True),
    Column("slot", Integer, primary_key=True),
    Column("seq", ForeignKey("generations.seq", ondelete="CASCADE"), nullable=False),
    Index(None, "seq"),
)
"""domain: the clients' tag, "" for prompts without one; kind: in that case the name from likeness.kind, otherwise ""."""

replay_domains = Table(
    "replay_domains",
    metadata,
    Column("domain", FreeText(128), primary_key=True),
    Column("kind", String(128), primary_key=True),
    Column("seen", Integer, nullable=False),
)
"""One row per reservoir. seen: number of texts offered to it so far."""

members = Table(
    "members",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("token", String(32), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("host", String(256), nullable=False),
    Column("machine", String(256), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("target", String(64)),
    Column("tokenizer", String(64)),
    Column("draft", String(64)),
    Column("trains", Boolean, nullable=False),
    Column("erased", Serial, nullable=False),
    Column("renewed_at", DateTime(timezone=True), nullable=False),
    sqlite_autoincrement=True,
)
"""The processes that share this database (store.processes.members). machine: distinguishes equal host names. target,
tokenizer, draft: the models it serves or trains; null until they are loaded. trains: whether it executes training runs.
erased: the newest erasure it has carried out."""

erasures = Table(
    "erasures",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("selection", FreeText, nullable=False),
    sqlite_autoincrement=True,
)
"""Erasures in progress, which every process carries out in memory before the rows are deleted. selection:
core.Selection as JSON."""

round_costs = Table(
    "round_costs",
    metadata,
    Column("target", String(64), primary_key=True),
    Column("tokenizer", String(64), primary_key=True),
    Column("draft", String(64), primary_key=True),
    Column("machine", String(256), primary_key=True),
    Column("seconds", Text, nullable=False),
    Column("more", Text, nullable=False),
    Column("measured_at", DateTime(timezone=True), nullable=False),
)
"""Round costs of a pair on a kind of machine: core.RoundCosts."""

training_runs = Table(
    "training_runs",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("state", String(16), nullable=False),
    Column("trigger", String(16), nullable=False),
    Column("fencing", Integer, nullable=False),
    Column("owner", String(32)),
    Column("log_end", Serial),
    Column("idempotency_key", String(256), unique=True),
    Column("target", String(64), nullable=False),
    Column("tokenizer", String(64), nullable=False),
    Column("draft", String(64), nullable=False),
    Column("parent", Integer, nullable=False),
    Column("cases", Integer, nullable=False),
    Column("generations", Integer, nullable=False),
    Column("config", Text, nullable=False),
    Column("progress", Text, nullable=False),
    Column("loss_curve", Text, nullable=False),
    Column("adapter", Integer),
    Column("verdict", Text),
    Column("error", FreeText),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("finished_at", DateTime(timezone=True)),
    Index(None, "state"),
    # At most one open run per pair.
    Index(
        "uq_training_runs_open",
        "target",
        "tokenizer",
        "draft",
        unique=True,
        sqlite_where=OPEN_RUN,
        postgresql_where=OPEN_RUN,
    ),
)

"""owner: token of the process that executes the run; null: a claimed run waits for one. log_end: the newest
generation's seq at its claim, 0 for an empty log; null in rows of older releases."""

run_texts = Table(
    "run_texts",
    metadata,
    Column("run", ForeignKey("training_runs.id"), primary_key=True),
    Column("seq", ForeignKey("generations.seq", ondelete="CASCADE"), primary_key=True),
    Column("role", String(16), nullable=False),
    Index(None, "seq"),
)
"""Every text that a run learns from. role: store.log.run_texts.Role."""

adapters = Table(
    "adapters",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("folder", Text, nullable=False, unique=True),
    Column("sha256", String(64), nullable=False),
    Column("rank", Integer, nullable=False),
    Column("scale", Float, nullable=False),
    Column("keys", Text, nullable=False),
    Column("draft", String(64), nullable=False),
    Column("parent", Integer, nullable=False),
    Column("run", ForeignKey("training_runs.id")),
    Column("state", String(16), nullable=False),
    Column("note", FreeText),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("erased_texts", Integer),
    Column("log_end", Serial),
    Column("target", String(64)),
    Index(None, "draft", "state"),
    # At most one active adapter per pair.
    Index("uq_adapters_active", "target", "draft", unique=True, sqlite_where=ACTIVE, postgresql_where=ACTIVE),
)
"""folder: its name below the root of all adapters. erased_texts: see core.AdapterRef. log_end: the newest generation's
seq when it last became or ceased to be active; null: never. target: the model whose answers it learnt from; null: its
run is unknown."""

gains = Table(
    "gains",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("adapter", ForeignKey("adapters.id"), nullable=False),
    Column("figures", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Index(None, "adapter"),
)
"""figures: core.MeasuredGain as JSON."""

evaluations = Table(
    "evaluations",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("adapter", ForeignKey("adapters.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("verdict", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Index(None, "adapter", "kind"),
)
