"""The flags of `vllm serve`, made from the fields of `InflightConfig`.

A flag writes its value into `args.additional_config["inflight"]` when it is parsed,
because vLLM passes that to every process, also to spawned API servers. The admin key is
the exception. It goes into the environment, since configurations are logged.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from vllm.inflight.api.request.auth import check_api_keys
from vllm.inflight.config import ADMIN_KEY_ENV, InflightConfig, check_key
from vllm.inflight.errors import ConfigError

GROUP = "InflightConfig"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags to `parser`, once."""
    if any(group.title == GROUP for group in parser._action_groups):
        return
    group = parser.add_argument_group(
        title=GROUP, description="In-flight weight updates (vllm-inflight)."
    )
    for knob in dataclasses.fields(InflightConfig):
        flag = "--inflight-" + knob.name.replace("_", "-")
        group.add_argument(
            flag,
            dest=f"inflight_{knob.name}",
            action=_Fold,
            type=type(knob.default),
            default=argparse.SUPPRESS,  # the configuration has the default
            metavar="{" + ",".join(knob.metadata["choices"]) + "}"
            if knob.metadata["choices"]
            else knob.name.upper(),
            help=f"{knob.metadata['doc']} Default: {str(knob.default) or 'none'}.",
        )
    group.add_argument(
        "--inflight-admin-key",
        action=_Keep,
        default=argparse.SUPPRESS,
        help="Key of the control routes; with it the API key no longer opens them. "
        f"Better set it in the environment as {ADMIN_KEY_ENV}, because other users "
        "can see command lines.",
    )
    group.add_argument(
        "--inflight-allow-untested",
        action="store_true",
        default=argparse.SUPPRESS,  # the patches read it from the command line
        help="Start on a release of vLLM that was not tested, at your own risk.",
    )
    # Without this, an --additional-config after our flags would discard them.
    given = parser._option_string_actions["--additional-config"]
    given.__class__ = type("_Merge", (_MergeMixin, type(given)), {})
    # Only the parser of a server has this flag.
    if (keys := parser._option_string_actions.get("--api-key")) is not None:
        keys.__class__ = type("_Keys", (_KeysMixin, type(keys)), {})


class _Fold(argparse.Action):
    """Put a flag's value under its field in `additional_config`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        field = self.dest.removeprefix("inflight_")
        extra = dict(getattr(namespace, "additional_config", None) or {})
        ours = dict(extra.get("inflight") or {}) | {field: values}
        try:
            InflightConfig.parse({field: values})
        except ConfigError as error:
            parser.error(f"argument {option_string}: {error}")
        extra["inflight"] = ours
        namespace.additional_config = extra


class _Keep(argparse.Action):
    """Put a secret only into the environment."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            check_key("--inflight-admin-key", values)
        except ConfigError as error:
            parser.error(f"argument {option_string}: {error}")
        os.environ[ADMIN_KEY_ENV] = values


class _KeysMixin:
    """Reject blank keys of vLLM's `--api-key`, which open the control routes too."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        *args: object,
        **kwargs: object,
    ) -> None:
        super().__call__(parser, namespace, *args, **kwargs)  # type: ignore[misc]
        try:
            check_api_keys(namespace.api_key)
        except ConfigError as error:
            parser.error(f"argument --api-key: {error}")


class _MergeMixin:
    """Merge `--additional-config` with the values of our flags."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        *args: object,
        **kwargs: object,
    ) -> None:
        before = dict(getattr(namespace, "additional_config", None) or {})
        super().__call__(parser, namespace, *args, **kwargs)  # type: ignore[misc]
        after = namespace.additional_config or {}
        try:
            if not isinstance(after, dict):
                raise ConfigError("additional_config must be an object")
            InflightConfig.parse(after.get("inflight"))
        except ConfigError as error:
            parser.error(f"argument --additional-config: {error}")
        if before.get("inflight"):
            ours = {**(after.get("inflight") or {}), **before["inflight"]}
            after = after | {"inflight": ours}
        namespace.additional_config = after
