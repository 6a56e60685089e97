"""The knobs, each once: dataclass field, `vllm serve` flag and documentation.

`vllm serve --inflight-staging host` and
`LLM(additional_config={"inflight": {"staging": "host"}})` are the same setting:
both travel to every process in vLLM's `additional_config["inflight"]`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.inflight.errors import ConfigError

ADMIN_KEY_ENV = "VLLM_INFLIGHT_ADMIN_KEY"
API_KEY_ENV = "VLLM_API_KEY"


def _knob(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    limits: tuple[float, float] | None = None,
) -> Any:
    metadata = {"doc": doc, "choices": choices, "limits": limits}
    return field(default=default, metadata=metadata)


def _choice(value: Any) -> Any:
    """The choice that a value belongs to: `versioned:2` is one of `versioned:K`."""
    name, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if number.isdecimal() and 1 <= int(number) <= 64:
        return f"{name}:K"
    return None if number == "K" else value


def _is_within(value: Any, kind: type, low: float, high: float) -> bool:
    return type(value) in (int, kind) and low <= value <= high


@dataclass(frozen=True, kw_only=True, slots=True)
class InflightConfig:
    """Configuration of vLLM in-flight, equal in every process of an engine."""

    staging: str = _knob(
        "auto",
        "Where a new version grows beside the one served: 'device' (a second set "
        "of pages in GPU memory; the choice of 'auto' on a GPU), 'host' (a second "
        "set of weights in host memory; the choice of 'auto' on the CPU build), "
        "'off' (no second set: weight updates are refused).",
        choices=("auto", "device", "host", "off"),
    )
    prefix_cache: str = _knob(
        "versioned",
        "'versioned': a new request never reads KV that other weights computed. "
        "'versioned:K': it may read KV that is up to K updates old, K from 1 to 64. "
        "'versioned:auto': it may read KV of weights that have hardly moved since, see "
        "prefix_cache_drift. 'shared': it may read any, as in upstream vLLM.",
        choices=("versioned", "versioned:K", "versioned:auto", "shared"),
    )
    prefix_cache_drift: float = _knob(
        0.001,
        "With 'versioned:auto': how far the weights may move away from those that "
        "computed KV, as a share of their length and added up over updates, before new "
        "requests do not read it any more. 0 to 1.",
        limits=(0, 1),
    )
    openai_spans: str = _knob(
        "on",
        "'on': the choices of OpenAI's replies have the field weight_versions. "
        "'off': only if the request asks for it.",
        choices=("on", "off"),
    )
    kv_versions: str = _knob(
        "off",
        "'on': every output says which versions computed the KV that it attended to. "
        "'off': those of requests that ask for it do.",
        choices=("off", "on"),
    )
    when_paused: str = _knob(
        "queue",
        "What happens to requests that arrive during a pause: 'queue' (they wait), "
        "'reject' (503 with Retry-After; each request then asks the engine first).",
        choices=("queue", "reject"),
    )
    update_deadline_s: float = _knob(
        600.0,
        "Most seconds from the start of an update to its commit; after that it "
        "is aborted and serving goes on with the old weights. 0.1 to 86400.",
        limits=(0.1, 86400),
    )
    pause_lease_s: float = _knob(
        0.0,
        "Seconds after which a pause ends by itself unless its controller renews it, "
        "where the pause does not say; 0: never. 0 to 86400.",
        limits=(0, 86400),
    )
    health_s: float = _knob(
        60.0,
        "Seconds after which `/health` says 503 because the engine core has not "
        "answered, more than any step or call of the core may take; 0: never, as in "
        "upstream vLLM. 0 to 86400.",
        limits=(0, 86400),
    )
    stage_share: float = _knob(
        0.07,
        "Share of one core that staging may take from each rank while it decodes; "
        "1 stages as fast as it can. An idle rank stages at full speed, and so "
        "does one with half of the deadline gone. 0.01 to 1.",
        limits=(0.01, 1),
    )
    stage_gb_per_s: float = _knob(
        250.0,
        "Most GB a second that staging writes on a GPU, of the memory bandwidth "
        "that decoding lives on. 1 to 10000.",
        limits=(1, 10000),
    )
    verify: str = _knob(
        "digest",
        "'digest': compute the content digest of every tensor, compare it with "
        "the manifest's and refuse NaN and Inf. 'served': that, and after every commit "
        "read back what is served, beside decoding, as at each scrub_interval_s. "
        "'off': check names, shapes, dtypes and completeness only.",
        choices=("digest", "served", "off"),
    )

    scrub_interval_s: float = _knob(
        0.0,
        "Seconds between two scrubs: what every rank serves is read, slowly and beside "
        "decoding, and compared with what the digest of its label says; a difference "
        "is logged, counted in /metrics and told by /health. 0: only on demand. 0 to "
        "86400.",
        limits=(0, 86400),
    )
    port: int = _knob(
        0,
        "Port on which the control routes answer, and then on no other; of several API "
        "servers the first one listens there. 0: they answer on the server's own port. "
        "0 to 65535.",
        limits=(0, 65535),
    )
    host: str = _knob(
        "127.0.0.1",
        "Address that 'port' is opened on; without a key only this host is answered "
        "on any.",
    )
    allowed_paths: str = _knob(
        "",
        "Folders of the engine's host, with ':' between them, from which updates may "
        "read files; symlinks are followed before that is judged. Empty: any that the "
        "process can read.",
    )
    journal: str = _knob(
        "",
        "File of the engine's host that says what is served and which files it came "
        "from, written at every switch. A server that starts with it serves that "
        "again. Empty: none.",
    )
    begin_rate: float = _knob(
        0.0,
        "Updates a minute that one caller, told by key or address, may begin over "
        "HTTP; more are answered 429. Each API server counts its own. 0: any number. "
        "0 to 6000.",
        limits=(0, 6000),
    )
    log_level: str = _knob(
        "info",
        "Level of the lines that the server's log has of updates, rollbacks and "
        "pauses, one for each event: 'debug', 'info', 'warning'. What is refused or "
        "given up is a warning at least. 'off': there are none.",
        choices=("debug", "info", "warning", "off"),
    )
    pickled_tensors: str = _knob(
        "off",
        "'on': `/update_weights_from_tensor` reads SGLang's pickled tensors as well, "
        "with an unpickler that knows tensors only. 'off': safetensors only.",
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
    def parse(cls, values: Any) -> InflightConfig:
        """The configuration in `additional_config["inflight"]`.

        Raises:
            ConfigError: naming the field and what it may be.

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
                    f"inflight {name} is not a field; fields are {', '.join(known)}"
                )
        return cls(**values)

    @classmethod
    def of(cls, vllm_config: Any) -> InflightConfig:
        """The configuration that a `VllmConfig` carries."""
        extra = vllm_config.additional_config
        return cls.parse(extra.get("inflight") if isinstance(extra, Mapping) else None)


def admin_key() -> str | None:
    """The key of the control routes, from the environment; never in a config.

    `additional_config` is logged at start-up and hashed into cache keys, so a
    secret has no place there: `--inflight-admin-key` sets this variable too.
    """
    return os.environ.get(ADMIN_KEY_ENV) or None


def check_key(source: str, key: str | None) -> None:
    """Refuse a key that was meant and that no client can send.

    An optional secret that is not there arrives as an empty variable. Taken for "no
    key" it would leave open what its owner believes to be closed.

    Args:
        source: the flag or variable that the key comes from, for the message.
        key: the key; None where none was given.

    Raises:
        ConfigError: it is blank, or has blanks around it.

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
    """`check_key` of the variables that a server takes keys from.

    Args:
        serves: whether this process starts a server. An engine in the caller's process
            has no routes, and vLLM's own variable is none of our business there.

    Raises:
        ConfigError: one of them is set and cannot be a key.

    """
    check_key(ADMIN_KEY_ENV, os.environ.get(ADMIN_KEY_ENV))
    if serves:
        check_key(API_KEY_ENV, os.environ.get(API_KEY_ENV))
