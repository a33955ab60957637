"""One frozen tree of settings: configs/*.toml, then environment (REDRAFT_SECTION__NAME), then flags.

Only `app` and `cli` read it; every other room is handed the values it needs. Unknown names are refused.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self, cast
from urllib.parse import quote

from limits import parse as parse_rate
from platformdirs import user_data_path
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from service.core import BadRequest

PathSetting = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path, in which ~ stands for the user's folder."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
MIN_KEY_CHARS = 16
HOST_NAME = re.compile(r"[^\[\]/:@?#\s*]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?")


def default_home() -> Path:
    """Where models, adapters and the database live by default: $REDRAFT_HOME; else the home of an earlier install, if
    there is one; else the platform's folder for a user's data."""
    if home := os.environ.get("REDRAFT_HOME"):
        return Path(home).expanduser()
    earlier = earlier_home()
    return earlier if earlier.is_dir() else user_data_path("redraft", appauthor=False)


def earlier_home() -> Path:
    """The home of earlier installs: in the cache folder, which cleaners may empty."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "redraft"


def sqlite_url(path: Path) -> str:
    """SQLAlchemy decodes percent signs in a URL, so a path's own are written as such."""
    return f"sqlite:///{quote(str(path))}"


class Section(BaseModel):
    """A table of the settings file: frozen, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(Section):
    """Which pair to serve."""

    target: str = "smollm2-135m"
    """Catalogue name, hub name, or folder of the target model."""
    draft: str | None = None
    """The same for the draft. None: one that ships for this target, was made from it, or is of its family, and no draft where
    there is none; "none": no draft."""
    revision: str | None = None
    """Hub revision of the target to pin."""


class EngineSettings(Section):
    """How tokens are made."""

    num_draft_tokens: int = Field(default=7, ge=0, le=16)
    """Tokens drafted per round, at most; 0: the draft model is not used."""
    adaptive: bool = True
    """Draft as many as pay for the batch at hand, by how sure the draft is of each, down to none; false: always
    num_draft_tokens."""
    num_lookup_tokens: int = Field(default=15, ge=0, le=32)
    """Tokens looked up per round, at most, in what was said before, where that promises more; 0, or not adaptive: none."""
    max_rows: int = Field(default=16, ge=1, le=256)
    """Requests decoded together."""
    max_waiting: int = Field(default=64, ge=0)
    """Requests queued beyond that before new ones are refused."""
    prefill_chunk: int | None = Field(default=None, ge=16)
    """Prompt tokens processed between two decoding rounds; None: as many as suit the device."""
    max_gap_ms: float | None = Field(default=None, gt=0)
    """How long running requests wait for a prefill between two rounds, at most: it then goes in smaller chunks. None: 200 on a
    GPU, no bound on a CPU."""
    prefix_cache_mb: int | None = Field(default=None, ge=0)
    """Memory (MiB), at most, for what the models made of earlier requests, so that beginnings in common are read once; 0: none.
    None: all of `kv_budget_mb` that running requests leave. It gives way to them in any case."""
    prefix_cache_dir: PathSetting | None = None
    """Folder where the target's part of it is kept for the next start, with the tokens of prompts and answers; None: none."""
    prefix_cache_disk_mb: int = Field(default=8192, ge=0)
    """Size (MiB) of that folder's files, at most."""
    kv_budget_mb: int = Field(default=0, ge=0)
    """Memory (MiB) for the requests that run (keys and values, recurrent states) and for cached prefixes; 0: what is free once
    the models are loaded. On CUDA all of it is taken at the start, and more than is free is refused."""
    memory_gb: float = Field(default=0.0, ge=0)
    """Memory (GiB) of the machine to plan for, where it is to be less than this one's: the server then takes what a Mac of that
    size has for it (`redraft doctor --memory`). 0: this machine's own. Not on CUDA."""
    max_context: int = Field(default=0, ge=0)
    """Prompt and output tokens of one request together; 0: the model's own limit, which wins where it is lower, as does what
    memory does for."""
    tie_margin: float = Field(default=1e-3, ge=0.0)
    """Top-2 log-probability gap below which a disagreement counts as numerical noise."""
    hang_seconds: float = Field(default=120.0, gt=0)
    """Without progress for this long while work is waiting, the process reports not ready and exits."""
    idle_unload_minutes: float = Field(default=0.0, ge=0)
    """After so many minutes without a request the models are unloaded, and loaded again at the next request or when a run needs
    them; 0: never. Not on CUDA."""


class StoreSettings(Section):
    """What is remembered, and for how long."""

    url: str | None = None
    """SQLAlchemy URL; None: SQLite in the home folder."""
    adapters: PathSetting | None = None
    """Where adapter folders live; None: in the home folder."""
    record: bool = True
    """Record prompts and answers, which is what the draft learns from; false also needs training.enabled = false."""
    max_generations: int = Field(default=50_000, ge=1)
    """Older generations beyond this many are purged by the tick, but for those that are replayed."""
    max_days: float | None = Field(default=None, gt=0)
    """Generations that were recorded longer ago are purged too, replayed ones among them; None: however old they are."""
    max_mb: int | None = Field(default=None, ge=0)
    """Size (MiB) of the tokens, rounds and probabilities that are recorded, at most: beyond it the oldest are purged, replayed
    ones among them. 0: no limit. None: a fiftieth of the disk that holds SQLite's file, between 512 MiB and 16 GiB; no limit
    in PostgreSQL."""
    replies_mb: int = Field(default=64, ge=0)
    """Memory (MiB), at most, for the answers of `/v1/responses` and the threads of `/v1/messages`, with their conversations,
    which later requests continue by an id; those not used for the longest time go first. 0: none are kept, nor without
    `record`."""
    keep_adapters: int = Field(default=3, ge=0)
    """Retired and rolled-back adapters of each pair whose files are kept for a rollback, newest first. The active adapter and
    those that it was trained on top of are always kept. The files of rejected, broken and revoked ones are deleted, a rejected
    one's when there is a newer adapter."""


class TrainingSettings(Section):
    """When and how the draft's adapter is trained. Defaults: docs/decisions/loop.md, docs/decisions/training.md."""

    enabled: bool = True
    """Runs start by themselves; false: only when asked for (`redraft train`)."""
    run_here: bool = True
    """Do runs in children of this server; false leaves them to other processes of the same database (`redraft trainer`)."""
    tick_seconds: float = Field(default=15.0, gt=0)
    """How often is looked whether a run should start or old texts are to be deleted."""
    min_cases: int = Field(default=400, ge=1)
    """Untrained, untied failure cases needed before a run starts by itself."""
    min_tokens: int = Field(default=4_000, ge=1)
    """Output tokens of the untrained generations needed before a run starts by itself."""
    cooldown_seconds: float = Field(default=300.0, ge=0)
    """No run starts by itself for so long after the last one: twice as long after each run that was refused since the last
    promotion, and after each further failure in a row, at most 32 times."""
    idle_seconds: float = Field(default=60.0, ge=0)
    """A run starts by itself when nothing was asked here for so long, or when its expected gain is worth more serving time
    within a day than it costs. 0: at any moment."""
    minutes_per_day: float = Field(default=120.0, ge=0, le=1440)
    """So many minutes of runs on logged texts in 24 hours, scoring, pauses and runs that are asked for included; none starts by
    itself that would exceed it. 0: none starts by itself."""
    max_generations: int = Field(default=800, ge=1)
    """Newest untrained generations a single run trains on."""
    window: int = Field(default=700, ge=0)
    """Generations a run learns from at least: where fewer are new, the newest before them come along; 0: the new ones alone."""
    replay: Share = 0.2
    """Share of the training examples that come from the replay buffer."""
    rank: int = Field(default=16, ge=1, le=256)
    """LoRA rank."""
    scale: float = Field(default=2.0, gt=0)
    """LoRA scale: what the low-rank product is multiplied by."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Of AdamW, at its highest."""
    epochs: int = Field(default=2, ge=1)
    """Passes over the training texts."""
    batch_size: int = Field(default=8, ge=1)
    """Examples in a step."""
    accumulate: int = Field(default=1, ge=1)
    """Batches whose gradients are averaged for one step."""
    max_length: int = Field(default=512, ge=8)
    """Prompt and response tokens of one example; a longer text becomes several, which overlap by half."""
    clip: float = Field(default=1.0, gt=0)
    """Largest norm of a gradient; a larger one is scaled down to it."""
    warmup: Share = 0.1
    """Share of the steps in which the learning rate rises."""
    niceness: int = Field(default=10, ge=0, le=19)
    """Of the child process: 19 leaves the most of the CPU to others."""
    gpu_share: Share = Field(default=0.65, gt=0)
    """On a GPU a run is throttled to this share of the time, so that serving has the rest."""
    threads: int = Field(default=0, ge=0)
    """BLAS threads of the child; 0: half of the cores. Serving keeps the others while it runs."""
    memory_gb: float = Field(default=0.0, ge=0)
    """A run may take so much of the device's memory; 0: what is free. It fits itself into that: smaller micro-batches, gradient
    checkpointing, then shorter texts."""
    timeout_seconds: float = Field(default=3600.0, gt=0)
    """A run may take so long; pauses, and the time for which the machine sleeps, are not counted."""
    pause_on_battery: bool = True
    """Pause runs, and start none, while the machine runs on its battery."""
    pause_when_hot: bool = True
    """The same while the system slows the machine down to cool it."""
    pause_on_memory_pressure: bool = True
    """The same while the system is short of memory."""
    practice: bool = False
    """While nothing is asked, the target writes text like what was logged, and the draft learns from it. Set, true or false, it
    wins over what an operator chose (`redraft practice --on`, the page)."""
    practice_minutes_per_day: float = Field(default=60.0, ge=0, le=1440)
    """So many minutes of practice in 24 hours, what is asked for included; none starts by itself beyond it."""
    practice_gb: float = Field(default=2.0, ge=0)
    """Practice text that stays on disk; the oldest goes first."""
    practice_rank: int = Field(default=64, ge=1, le=256)
    """LoRA rank of what practice trains; later runs on top of it have at least its rank."""


class GateSettings(Section):
    """What a candidate must prove, and what rolls it back."""

    min_prompts: int = Field(default=30, ge=1)
    """Held-out prompts needed for a verdict."""
    min_tokens: int = Field(default=2_000, ge=1)
    """Their output tokens needed for a verdict."""
    max_prompts: int = Field(default=200, ge=1)
    """The newest held-out prompts that a candidate is scored on, and as many texts of the golden set."""
    max_tokens: int | None = Field(default=None, ge=1024)
    """Tokens, of prompts and outputs, that a gate or one check of the watch scores, counted once for each adapter. Unset: as
    many as take a quarter of the run's time by measured speed, but at least 65,536 and those of `min_prompts` prompts."""
    domain_tolerance: Share = 0.02
    """What a candidate may lose on one domain or the golden set: against its parent, where it is surely worse; against the base
    draft, by the upper confidence limit of the loss where there are 60 conversations or more."""
    bootstrap: int = Field(default=2_000, ge=100)
    """Resamples from which the confidence bounds are computed."""
    watch_generations: int = Field(default=200, ge=1)
    """New generations after a promotion on which the adapter is compared with its parent and the base draft: after a
    sixteenth, an eighth, a quarter, a half and all of them, until it is decided. Runs wait for a quarter of them, or a day."""
    backoff_seconds: float = Field(default=1800.0, ge=0)
    """No run starts by itself for so long after an adapter was rolled back; twice as long after each one more in a row, at most
    32 times."""


class ServerSettings(Section):
    """How the server is reached, and what one request may cost."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8321, ge=0, le=65535)
    """Port to listen on; 0: a free one."""
    allowed_hosts: list[str] = ["localhost", "127.0.0.1", "::1", "host.docker.internal", "host.containers.internal"]
    """Names and addresses by which clients may call a server without keys (`Host`), without ports; `host` is always one of
    them. The last two are this machine's, as containers on it call it. A server with keys may be called by any name."""
    model_aliases: list[str] = []
    """Names of the model in the API, in place of the target's own: `GET /v1/models` lists them first, and answers have the one
    that the request used, else the first. The target's own name is answered too."""
    strict_requests: bool = False
    """Fields that this server never heard of are refused with 400, and names of models that it does not serve with 404.
    Otherwise such a request is answered, and the header `x-redraft-ignored` names what was ignored."""
    max_body_bytes: int = Field(default=2**25, ge=1024)
    """Largest body of a request; a larger one gets 413."""
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds that a request may wait for its first token, and a stream for the next one; a whole answer may take so long in
    all. Then the answer ends with what there is (`length`), or with 504 where there is no token. A body may take so long
    too."""
    arrival_seconds: float = Field(default=30.0, gt=0)
    """The head of a request has to arrive within so many seconds of its first byte, and a body may pause for as long; then
    408."""
    idle_seconds: int = Field(default=75, ge=1)
    """A connection without a request is kept so long for the next one."""
    keepalive_seconds: float = Field(default=15.0, gt=0)
    """Silence on a stream after which an SSE comment is sent."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running requests may finish after SIGTERM."""
    api_key: SecretStr | None = None
    """A key of a client, besides those of `redraft keys`. Once there is any key, every request needs one; on any address but a
    loopback one there has to be."""
    operator_key: SecretStr | None = None
    """The same for an operator, who may also read metrics, train, switch adapters, and read or erase what is recorded."""
    rate_limit: str | None = None
    """Requests to routes that generate, of one key (or address), such as "60/minute", and as many that count tokens; None: no
    limit."""
    share_across_keys: bool = False
    """Requests with different keys use each other's cached prefixes and look-ups: faster, but counts of cached and drafted
    tokens, and times, then say something about what others asked."""
    draft_counts: bool = False
    """Where there are several keys, answers tell clients too how many tokens were drafted and accepted. The draft has learnt
    from what all keys asked, so these counts say something about the texts of others; operators' answers always have them."""
    cors_origins: list[str] = []
    """Origins of other sites' pages that may call this server, such as "https://chat.example". Applications whose pages have a
    scheme of their own (`app://`, `tauri://`, `vscode-webview://`) may call with a key without being named here."""
    ssl_certfile: PathSetting | None = None
    """Certificate (chain) for HTTPS, PEM; goes with ssl_keyfile."""
    ssl_keyfile: PathSetting | None = None
    """Its key, PEM."""
    log_format: Literal["text", "json"] = "text"
    """Of the lines on stderr."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines of lower levels are left out; that of a request is of level info."""

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not HOST_NAME.fullmatch(name):
                raise ValueError("names or addresses without scheme, port or wildcard")
        return names

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if not re.fullmatch(r"https?://[^/*\s]+|(?!https?:)[a-z][a-z0-9+.-]*://[^/*\s]*", origin):
                raise ValueError(
                    "a scheme, a host and perhaps a port, as browsers send them: https://chat.example, app://chat.example"
                )
        return origins

    @field_validator("rate_limit")
    @classmethod
    def _rate(cls, rate: str | None) -> str | None:
        if rate is not None:
            parse_rate(rate)
        return rate

    @field_validator("api_key", "operator_key")
    @classmethod
    def _long_enough(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not re.fullmatch(rf"[\x21-\x7e]{{{MIN_KEY_CHARS},512}}", key.get_secret_value()):
            raise ValueError(f"{MIN_KEY_CHARS} to 512 printable characters, none of them a space")
        return key

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together")
        return self

    @property
    def loopback(self) -> bool:
        """Whether `host` is reached from this machine alone."""
        return self.host in LOOPBACK


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="REDRAFT_", env_nested_delimiter="__", env_ignore_empty=True
    )

    home: PathSetting = Field(default_factory=default_home)
    """Where models, adapters and the database live where nothing else is said (`REDRAFT_HOME`)."""
    models: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    store: StoreSettings = StoreSettings()
    training: TrainingSettings = TrainingSettings()
    gate: GateSettings = GateSettings()
    server: ServerSettings = ServerSettings()

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL: `store.url`, else SQLite in `home`."""
        return self.store.url or sqlite_url(self.home / "redraft.db")

    @property
    def adapters_dir(self) -> Path:
        """Root of the adapter folders: `store.adapters`, else `adapters` in `home`."""
        return self.store.adapters or self.home / "adapters"

    @model_validator(mode="after")
    def _safe(self) -> Settings:
        if self.training.enabled and not self.store.record:
            raise ValueError("training.enabled needs store.record: there is nothing to learn from unrecorded traffic")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Sources, strongest first: arguments, environment, TOML file. Dotenv and secret files are not read."""
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))


def load_settings(config: Path | None = None, flags: Mapping[str, object] | None = None) -> Settings:
    """Read settings from `config` (a TOML file), the environment, and `flags` (dotted names such as "server.port").

    Raises BadRequest with every problem named when a value is wrong, unknown, or unsafe.
    """
    if config is not None and not config.is_file():
        raise BadRequest(f"no such configuration file: {config}", field="config")
    if unknown := [name for name in os.environ if _section(name) not in {None, *Settings.model_fields}]:
        raise BadRequest(f"settings refused: {', '.join(sorted(unknown))}: there is no such section", field="settings")

    class Configured(Settings):
        model_config = SettingsConfigDict(toml_file=config)

    tree = _tree(flags or {})
    try:
        return Configured(**tree)  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'settings'}: {item['msg']}" for item in error.errors()
        )
        raise BadRequest(f"settings refused: {problems}", field="settings") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise BadRequest(f"{config} cannot be read as TOML: {error}", field="config") from error
    except SettingsError as error:
        raise BadRequest(f"settings refused: {error}", field="settings") from error


class Origin(StrEnum):
    """Where a setting's value comes from, strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its dotted name, its value, and where that comes from."""

    name: str
    value: object
    origin: Origin


def list_settings(config: Path | None = None, flags: Mapping[str, object] | None = None) -> list[Setting]:
    """Every setting as `load_settings` reads it, in the order of the sections. Raises BadRequest as that does."""
    settings = load_settings(config, flags)
    file = TomlConfigSettingsSource(Settings, toml_file=config)() if config is not None else {}
    given = {
        Origin.FLAG: _leaves(_tree(flags or {})),
        Origin.ENVIRONMENT: _leaves(EnvSettingsSource(Settings)()),
        Origin.FILE: _leaves(file),
    }
    return [
        Setting(name, value, next((origin for origin, names in given.items() if name in names), Origin.DEFAULT))
        for name, value in _leaves(dict(settings)).items()
    ]


def _section(variable: str) -> str | None:
    """The section that an environment variable names; None where it names no setting of one."""
    section, separator, _ = variable.lower().removeprefix("redraft_").partition("__")
    return section if separator and variable.lower().startswith("redraft_") else None


def _tree(flags: Mapping[str, object]) -> dict[str, object]:
    """Flags by their dotted names as one tree."""
    tree: dict[str, object] = {}
    for name, value in flags.items():
        *path, leaf = name.split(".")
        node = tree
        for part in path:
            child = node.setdefault(part, {})
            assert isinstance(child, dict)
            node = child
        node[leaf] = value
    return tree


def _leaves(tree: Mapping[str, object]) -> dict[str, object]:
    """The values of a tree of sections by their dotted names."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Section):
            value = dict(value)
        if isinstance(value, Mapping):
            inner = _leaves(cast("Mapping[str, object]", value))
            found |= {f"{name}.{below}": leaf for below, leaf in inner.items()}
        else:
            found[name] = value
    return found
