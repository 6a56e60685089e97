"""The configuration: each knob is a field, a `vllm serve` flag and its documentation.

`vllm serve --inflight-staging host` and
`LLM(additional_config={"inflight": {"staging": "host"}})` are the same setting:
both travel to every process in vLLM's `additional_config["inflight"]`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.inflight.errors import ConfigError
from vllm.inflight.wording import nearest

OURS = "inflight"
"""The entry of vLLM's `additional_config` that has our fields."""
ADMIN_KEY_ENV = "VLLM_INFLIGHT_ADMIN_KEY"
API_KEY_ENV = "VLLM_API_KEY"
CONFIG_ENV = "VLLM_INFLIGHT_CONFIG"
RUST_ENV = "VLLM_USE_RUST_FRONTEND"
ALLOW_RUST_ENV = "VLLM_INFLIGHT_ALLOW_RUST_FRONTEND"


def _knob(
    default: object,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    limits: tuple[float, float] | None = None,
) -> Any:
    metadata = {"doc": doc, "choices": choices, "limits": limits}
    return field(default=default, metadata=metadata)


def _choice(value: object) -> Any:
    """The entry of `choices` that allows a value: `versioned:2` is `versioned:K`."""
    name, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if number.isdecimal() and 1 <= int(number) <= 64:
        return f"{name}:K"
    return None if number == "K" else value


def _is_within(value: Any, kind: type, low: float, high: float) -> bool:
    return type(value) in (int, kind) and low <= value <= high


@dataclass(frozen=True, kw_only=True, slots=True)
class InflightConfig:
    """Configuration of vLLM in-flight; the same in every process of an engine."""

    staging: str = _knob(
        "auto",
        "Where the shadow weights are, into which an update is loaded while the live "
        "weights serve. 'device': in GPU memory. 'host': in host memory. 'delta': "
        "there are none; an update is kept as the elements that it changes, see "
        "delta_gib. 'auto': 'device' on a GPU, or 'delta' where the GPU is too small "
        "for both; 'host' on the CPU build. 'off': weight updates are rejected.",
        choices=("auto", "device", "host", "delta", "off"),
    )
    delta_gib: float = _knob(
        0.0,
        "With staging 'delta', GiB of the log of changed elements on each rank; an "
        "element of bf16 takes 6 bytes of it. An update that changes more goes on in "
        "host memory, see delta_host_gib. 0: a twentieth of the weights, of which "
        "notes of what differs take a 128th. 0 to 1024.",
        limits=(0, 1024),
    )
    delta_host_gib: float = _knob(
        -1.0,
        "With staging 'delta', most GiB of host memory on each rank in which the log "
        "of changed elements goes on; on a GPU it is page-locked. It is taken when it "
        "is first needed, and kept. An update that changes more is rejected. 0: none. "
        "-1: a quarter of the weights. -1 to 4096.",
        limits=(-1, 4096),
    )
    prefix_cache: str = _knob(
        "versioned",
        "Which KV in the prefix cache a new request may read. 'versioned': only KV "
        "that the live weights computed. 'versioned:K': KV that is up to K updates "
        "old, K from 1 to 64. 'versioned:auto': KV of weights that have hardly "
        "changed since, see prefix_cache_drift. 'shared': all KV, as in upstream "
        "vLLM.",
        choices=("versioned", "versioned:K", "versioned:auto", "shared"),
    )
    prefix_cache_drift: float = _knob(
        0.001,
        "Limit for 'versioned:auto'. The change of the weights since the KV was "
        "computed is summed over updates, as a share of the weights' norm. Above the "
        "limit, new requests no longer read that KV. 0 to 1.",
        limits=(0, 1),
    )
    openai_spans: str = _knob(
        "on",
        "'on': every choice of an OpenAI reply has the field weight_versions. 'off': "
        "only if the request asks for it.",
        choices=("on", "off"),
    )
    kv_versions: str = _knob(
        "off",
        "'on': every output says which versions computed the KV that it attended to. "
        "'off': only outputs of requests that ask for it.",
        choices=("off", "on"),
    )
    when_paused: str = _knob(
        "queue",
        "What happens to requests that arrive during a pause. 'queue': they wait. "
        "'reject': they are answered with 503 and Retry-After; the server then asks "
        "the engine before each request.",
        choices=("queue", "reject"),
    )
    adopt: str = _knob(
        "on",
        "'on': worker calls by which known frameworks write weights (OpenRLHF, verl "
        "and others) become updates: they are staged, verified and committed. If it "
        "is given, such a call that cannot become one is rejected; by default it "
        "writes into the live weights. "
        "'direct': so do calls of the model's load_weights by code in the engine's own "
        "process (TRL and ms-swift colocated). 'off': all of them write into the live "
        "weights, as in upstream vLLM.",
        choices=("on", "direct", "off"),
    )
    update_deadline_s: float = _knob(
        600.0,
        "Most seconds from the start of an update to its commit. After that the "
        "update is aborted, and the old weights serve on. 0.1 to 86400.",
        limits=(0.1, 86400),
    )
    pauses: str = _knob(
        "obey",
        "'obey': a pause stops decoding. 'absorb': a pause 'in_place' (upstream's "
        "'keep') or 'retract' is answered at once, and decoding goes on until "
        "something needs the pause: an out-of-band write, a worker call that is not "
        "adopted or brings a single tensor, a sleep, or ten seconds without an update.",
        choices=("obey", "absorb"),
    )
    pause_lease_s: float = _knob(
        0.0,
        "Default lease of a pause: the pause ends after so many seconds unless its "
        "owner renews it. 0: it does not end by itself. 0 to 86400.",
        limits=(0, 86400),
    )
    health_s: float = _knob(
        60.0,
        "`/health` answers 503 if the engine core has not answered for so many "
        "seconds. Choose more than any step or call of the core may take. 0: never, "
        "as in upstream vLLM. 0 to 86400.",
        limits=(0, 86400),
    )
    stage_share: float = _knob(
        0.07,
        "Share of one core that staging may take from each rank while it decodes. "
        "With 1, staging is as fast as it can be. An idle rank stages at full speed, "
        "and so does every rank once half of the deadline is over. 0.01 to 1.",
        limits=(0.01, 1),
    )
    stage_gb_per_s: float = _knob(
        250.0,
        "Most GB per second that staging writes on a GPU. Staging and decoding share "
        "the memory bandwidth. 1 to 10000.",
        limits=(1, 10000),
    )
    verify: str = _knob(
        "digest",
        "'digest': compute the content digest of every tensor, compare it with the "
        "manifest's, and reject NaN and Inf. 'served': as 'digest', and after every "
        "commit scrub the live weights once, see scrub_interval_s. 'off': check "
        "names, shapes, dtypes and completeness only.",
        choices=("digest", "served", "off"),
    )

    scrub_interval_s: float = _knob(
        0.0,
        "Seconds between two scrubs. A scrub reads back the live weights of every "
        "rank, slowly and while decoding goes on, and compares them with the "
        "committed digest. A difference is logged, counted in /metrics and reported "
        "by /health. 0: only on request. 0 to 86400.",
        limits=(0, 86400),
    )
    port: int = _knob(
        0,
        "Port of its own for the control routes; no other port then answers them. "
        "With several API servers, the first one listens there. 0: the server's own "
        "port answers them. 0 to 65535.",
        limits=(0, 65535),
    )
    host: str = _knob(
        "127.0.0.1",
        "Address on which 'port' is opened. Without a key, only callers on this host "
        "are answered, whatever the address.",
    )
    allowed_paths: str = _knob(
        "",
        "Folders on the engine's host from which updates may read files, separated "
        "by ':'. Symlinks are followed before the check. Empty: every file that the "
        "process can read.",
    )
    journal: str = _knob(
        "",
        "File on the engine's host that records the live version and the files it "
        "was loaded from. It is written at every commit and rollback. A server that "
        "starts with it serves that version again. Empty: none.",
    )
    begin_rate: float = _knob(
        0.0,
        "Most updates per minute that one caller may start over HTTP; a caller is a "
        "key or an address. Further starts are answered with 429. Each API server "
        "counts for itself. 0: no limit. 0 to 6000.",
        limits=(0, 6000),
    )
    log_level: str = _knob(
        "info",
        "Level of the server's log lines on updates, rollbacks and pauses, one line "
        "per event: 'debug', 'info', 'warning'. Rejected and aborted calls are "
        "logged as warnings at least. 'off': no lines.",
        choices=("debug", "info", "warning", "off"),
    )
    pickled_tensors: str = _knob(
        "off",
        "'on': `/update_weights_from_tensor` also reads SGLang's pickled tensors and "
        "CUDA IPC handles, and `/update_weights_from_ipc` a checkpoint-engine's "
        "messages, with an unpickler that accepts tensors only. 'off': safetensors "
        "only.",
        choices=("off", "on"),
    )

    def __post_init__(self) -> None:
        for knob in dataclasses.fields(self):
            value = getattr(self, knob.name)
            choices, limits = knob.metadata["choices"], knob.metadata["limits"]
            if type(knob.default) is str and type(value) is not str and not choices:
                raise ConfigError(
                    f"inflight {knob.name} must be a string, got {value!r}"
                )
            if choices and _choice(value) not in choices:
                raise ConfigError(
                    f"inflight {knob.name} must be one of {', '.join(choices)}, "
                    f"got {value!r}"
                )
            if limits is not None and not _is_within(
                value, type(knob.default), *limits
            ):
                raise ConfigError(
                    f"inflight {knob.name} must be a number from {limits[0]} to "
                    f"{limits[1]}, got {value!r}"
                )
        named = {"allowed_paths": self.allowed_paths.split(":")}
        for field_name, paths in (named | {"journal": [self.journal]}).items():
            for path in filter(None, paths):
                if not os.path.isabs(path):
                    raise ConfigError(
                        f"inflight {field_name} must be absolute, got {path!r}"
                    )

    @classmethod
    def parse(cls, values: object) -> InflightConfig:
        """The configuration in `additional_config["inflight"]`.

        Raises:
            ConfigError: a field is unknown, or its value is not allowed.

        """
        if values is None:
            return cls()
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"additional_config['inflight'] must be an object, got {values!r}"
            )
        known = [knob.name for knob in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"inflight {name} is not a field{nearest(name, known)}; fields are "
                    f"{', '.join(known)}"
                )
        return cls(**values)

    @classmethod
    def of(cls, vllm_config: Any) -> InflightConfig:
        """The configuration that a `VllmConfig`, or its `EngineArgs`, carries."""
        return cls.parse(_given(vllm_config))

    @staticmethod
    def is_given(vllm_config: Any, name: str) -> bool:
        """Whether somebody has set a field, be it to its default."""
        given = _given(vllm_config)
        return isinstance(given, Mapping) and name in given


def with_environment(extra: Any) -> Any:
    """`additional_config` with the fields that the environment names.

    A framework that starts the engine itself may pass nothing of ours. Fields that
    `additional_config` has, and so flags, go before those of the environment.

    Args:
        extra: `additional_config`; it is not changed.

    Raises:
        ConfigError: the variable is no JSON object of fields and allowed values, or
            `additional_config` is no dictionary that could have them.

    """
    if not (text := os.environ.get(CONFIG_ENV)):
        return extra
    try:
        fields = json.loads(text)
        InflightConfig.parse(fields)
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            f'{CONFIG_ENV} must be a JSON object of fields, as {{"pauses": "absorb"}}: '
            f"{error}"
        ) from error
    if not isinstance(extra, Mapping | None):
        raise ConfigError(
            f"{CONFIG_ENV} is set, and additional_config is no dictionary: {extra!r}"
        )
    own = (extra or {}).get("inflight")
    if not isinstance(own, Mapping | None):
        return extra  # rejected by name when it is parsed
    return {**(extra or {}), "inflight": {**(fields or {}), **(own or {})}}


def _given(vllm_config: Any) -> object:
    extra = vllm_config.additional_config
    if not isinstance(extra, Mapping):
        return None
    for name in extra:
        if name != OURS and _is_misspelt(name):
            raise ConfigError(
                f"additional_config has {name!r}; the fields of vLLM in-flight are "
                f"under {OURS!r}"
            )
    return extra.get(OURS)


def _is_misspelt(name: object) -> bool:
    """Whether a name in `additional_config` is meant to be ours."""
    plain = re.sub("[^a-z]", "", str(name).lower()).removeprefix("vllm")
    return bool(difflib.get_close_matches(plain, [OURS], cutoff=0.9))


def admin_key() -> str | None:
    """The key of the control routes, from the environment; never in a config.

    `additional_config` is logged at start-up and hashed into cache keys, so a
    secret has no place there: `--inflight-admin-key` sets this variable too.
    """
    return os.environ.get(ADMIN_KEY_ENV) or None


def check_key(source: str, key: str | None) -> None:
    """Reject a key that is set but that no client can send.

    A secret that is missing often arrives as an empty variable. If that meant "no
    key", the routes would be open although their owner believes them closed.

    Args:
        source: the flag or variable that the key comes from, for the message.
        key: the key; None where none was given.

    Raises:
        ConfigError: the key is blank, or has blanks around it.

    """
    if key is None:
        return
    if not key.strip():
        raise ConfigError(
            f"{source} is set and its key is blank; leave it out, or give it a key"
        )
    if key != key.strip():
        raise ConfigError(
            f"{source} has a key with blanks or line ends around it, which no client "
            "can send; remove them"
        )


def check_keys_of_environment(*, serves: bool) -> None:
    """Apply `check_key` to the environment variables that hold keys.

    Args:
        serves: whether this process starts a server. An engine in the caller's process
            has no routes, so vLLM's own variable is not checked there.

    Raises:
        ConfigError: a variable is set and cannot be a key.

    """
    check_key(ADMIN_KEY_ENV, os.environ.get(ADMIN_KEY_ENV))
    if serves:
        check_key(API_KEY_ENV, os.environ.get(API_KEY_ENV))
