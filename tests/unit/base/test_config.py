"""Each configuration field has one name and one range, and reaches every process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.inflight.api.server.flags import GROUP, add_flags
from vllm.inflight.cli import doctor
from vllm.inflight.cli.finding import State
from vllm.inflight.config import (
    ADMIN_KEY_ENV,
    API_KEY_ENV,
    CONFIG_ENV,
    InflightConfig,
    admin_key,
    with_environment,
)
from vllm.inflight.errors import ConfigError
from vllm.inflight.patch import apply_all

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
KNOBS = dataclasses.fields(InflightConfig)

BAD = [
    ("staging", "disk", "one of auto, device, host, delta, off"),
    ("staging", None, "one of auto, device, host, delta, off"),
    (
        "prefix_cache",
        "Versioned",
        "one of versioned, versioned:K, versioned:auto, shared",
    ),
    (
        "prefix_cache",
        ["shared"],
        "one of versioned, versioned:K, versioned:auto, shared",
    ),
    ("verify", True, "one of digest, served, off"),
    ("allowed_paths", ["/models"], "a string"),
    ("allowed_paths", "models", "absolute"),
    ("delta_gib", -1, "a number from 0 to 1024"),
    ("update_deadline_s", 0.0, "a number from 0.1 to 86400"),
    ("update_deadline_s", -1, "a number from 0.1 to 86400"),
    ("update_deadline_s", 86401, "a number from 0.1 to 86400"),
    ("update_deadline_s", float("nan"), "a number from 0.1 to 86400"),
    ("update_deadline_s", float("inf"), "a number from 0.1 to 86400"),
    ("update_deadline_s", True, "a number from 0.1 to 86400"),
    ("update_deadline_s", "600", "a number from 0.1 to 86400"),
]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)
    ),
    max_leaves=8,
)


# The configuration itself


def test_an_empty_configuration_has_the_defaults():
    assert InflightConfig.parse(None) == InflightConfig.parse({}) == InflightConfig()


@pytest.mark.parametrize("field, value, allowed", BAD)
def test_a_bad_value_is_rejected_with_field_and_range(field, value, allowed):
    with pytest.raises(ConfigError) as refusal:
        InflightConfig.parse({field: value})
    assert f"inflight {field} must be" in str(refusal.value)
    assert allowed in str(refusal.value)
    assert repr(value) in str(refusal.value)


def test_an_unknown_field_is_rejected_with_the_known_ones():
    with pytest.raises(ConfigError) as refusal:
        InflightConfig.parse({"stagging": "host"})
    for knob in KNOBS:
        assert knob.name in str(refusal.value)


@given(st.dictionaries(st.sampled_from([k.name for k in KNOBS]), JSON) | JSON)
def test_any_other_json_is_rejected_as_a_configuration(values):
    try:
        config = InflightConfig.parse(values)
    except ConfigError:
        return
    assert 0.1 <= config.update_deadline_s <= 86400
    assert config.staging in ("auto", "device", "host", "off")


@pytest.mark.parametrize("name", ["in_flight", "in-flight", "Inflight", "vllm_inflght"])
def test_fields_under_a_misspelt_name_are_rejected(name):
    config = SimpleNamespace(additional_config={name: {"staging": "host"}})
    with pytest.raises(ConfigError, match=f"'{name}'.* under 'inflight'"):
        InflightConfig.of(config)


def test_entries_of_others_are_let_through():
    others = {"flight": 1, "inflight_batching": {}, "lightning": 1, 7: None}
    config = SimpleNamespace(additional_config=others | {"inflight": {}})
    assert InflightConfig.of(config) == InflightConfig()


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_every_knob_documents_each_of_its_choices(knob):
    assert knob.metadata["doc"].endswith(".")
    for choice in knob.metadata["choices"]:
        assert choice == "auto" or f"'{choice}'" in knob.metadata["doc"]


# The flags, in upstream's own parser


@pytest.fixture
def parser() -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    add_flags(parser)
    return parser


def bad_words() -> list[Any]:
    return [row for row in BAD if row[0] != "update_deadline_s" and type(row[1]) is str]


def bad_numbers() -> list[Any]:
    return [row for row in BAD if type(row[1]) in (int, float)]


def flag(field: str) -> str:
    return "--inflight-" + field.replace("_", "-")


def test_every_knob_has_a_flag_and_the_group_is_there_once(parser):
    add_flags(parser)
    assert [g.title for g in parser._action_groups].count(GROUP) == 1
    assert {flag(knob.name) for knob in KNOBS} <= parser._option_string_actions.keys()


def test_a_flag_is_carried_in_additional_config(parser):
    args = parser.parse_args(
        ["--inflight-staging", "host", "--inflight-update-deadline-s", "30"]
    )
    assert args.additional_config == {
        "inflight": {"staging": "host", "update_deadline_s": 30.0}
    }


def test_additional_config_stays_empty_without_a_flag(parser):
    assert not parser.parse_args([]).additional_config


@pytest.mark.parametrize("field, value, allowed", [*bad_words(), *bad_numbers()])
def test_a_flag_with_a_bad_value_is_rejected_with_its_range(
    parser, capsys, field, value, allowed
):
    with pytest.raises(SystemExit):
        parser.parse_args([f"{flag(field)}={value}"])
    message = capsys.readouterr().err
    assert flag(field) in message
    assert allowed in message


def test_a_word_where_a_number_belongs_is_rejected(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--inflight-update-deadline-s", "soon"])
    assert "--inflight-update-deadline-s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given_args",
    [
        '--additional-config {"a":1,"inflight":{"verify":"off"}} '
        "--inflight-staging host",
        "--inflight-staging host --additional-config "
        '{"a":1,"inflight":{"verify":"off"}}',
        "--inflight-staging host --additional-config.a 1 "
        "--additional-config.inflight.verify off",
        '--additional-config {"a":1,"inflight":{"verify":"off","staging":"off"}} '
        "--inflight-staging host",
        "--inflight-staging host --additional-config "
        '{"a":1,"inflight":{"verify":"off","staging":"off"}}',
    ],
)
def test_flags_and_additional_config_add_up_and_the_flag_wins(parser, given_args):
    args = parser.parse_args(given_args.split())
    assert args.additional_config == {
        "a": 1,
        "inflight": {"verify": "off", "staging": "host"},
    }


@pytest.mark.parametrize("order", [1, -1])
def test_an_additional_config_that_is_no_object_is_rejected(parser, capsys, order):
    pairs = [
        ["--inflight-staging", "host"],
        ["--additional-config", '{"inflight": 3}'],
    ]
    with pytest.raises(SystemExit):
        parser.parse_args([word for pair in pairs[::order] for word in pair])
    assert "must be an object, got 3" in capsys.readouterr().err


def test_flags_of_one_command_line_do_not_affect_the_next(parser):
    parser.parse_args(["--inflight-staging", "host"])
    assert not parser.parse_args([]).additional_config


# The admin key


def test_the_admin_key_goes_into_the_environment_and_nowhere_else(parser, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY_ENV, "from before")
    args = parser.parse_args(["--inflight-admin-key", "s3cret", "--seed", "1"])
    assert os.environ[ADMIN_KEY_ENV] == "s3cret"
    assert admin_key() == "s3cret"
    assert "s3cret" not in repr(vars(args))


@pytest.fixture
def servers_parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    apply_all()
    return make_arg_parser(FlexibleArgumentParser())


UNUSABLE = ["", " ", "\t\n", "key\n", " key"]


@pytest.mark.parametrize("key", UNUSABLE)
@pytest.mark.parametrize("flag", ["--inflight-admin-key", "--api-key"])
def test_a_key_that_no_client_can_send_is_rejected(servers_parser, capsys, flag, key):
    before = dict(os.environ)
    with pytest.raises(SystemExit):
        servers_parser.parse_args([flag, key])
    assert "leave it out" in (told := capsys.readouterr().err) or "remove them" in told
    assert flag in told
    assert dict(os.environ) == before


def test_one_blank_key_among_several_is_rejected(servers_parser):
    with pytest.raises(SystemExit):
        servers_parser.parse_args(["--api-key", "a", ""])
    given = servers_parser.parse_args(["--api-key", "a", "b"])
    assert given.api_key == ["a", "b"]


@pytest.mark.parametrize("key", UNUSABLE)
def test_a_variable_that_is_set_and_cannot_be_a_key_ends_the_start(
    monkeypatch, tmp_path, key
):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    apply_all()
    args = EngineArgs(model=str(tmp_path))
    for variable, usages in {
        ADMIN_KEY_ENV: ("LLM_CLASS", "OPENAI_API_SERVER"),
        API_KEY_ENV: ("OPENAI_API_SERVER", "API_SERVER"),
    }.items():
        monkeypatch.setenv(variable, key)
        for usage in usages:
            with pytest.raises(ConfigError, match=f"^{variable} .* key"):
                args.create_engine_config(UsageContext[usage])
            with pytest.raises(ConfigError, match=f"^{variable} .* key"):
                args.create_engine_config(usage_context=UsageContext[usage])
        monkeypatch.delenv(variable)


def test_an_engine_has_the_fields_of_the_environment_unless_it_has_its_own(
    monkeypatch,
):
    extra = {"other": 1, "inflight": {"verify": "off"}}
    assert with_environment(extra) is extra
    monkeypatch.setenv(CONFIG_ENV, '{"verify": "served", "pauses": "absorb"}')
    merged = with_environment(extra)
    assert merged == {"other": 1, "inflight": {"verify": "off", "pauses": "absorb"}}
    assert with_environment(merged) == merged and extra["inflight"].keys() == {"verify"}
    alone = {"inflight": {"verify": "served", "pauses": "absorb"}}
    assert with_environment(None) == with_environment({}) == alone


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("absorb", "Expecting value"),
        ('["absorb"]', "must be an object"),
        ('{"pause": "absorb"}', "pause is not a field"),
        ('{"pauses": "absorbed"}', "must be one of obey, absorb"),
    ],
)
def test_a_configuration_of_the_environment_that_is_wrong_ends_the_start(
    monkeypatch, tmp_path, text, why
):
    from vllm.engine.arg_utils import EngineArgs

    apply_all()
    monkeypatch.setenv(CONFIG_ENV, text)
    with pytest.raises(ConfigError, match=f"^{CONFIG_ENV} must be a JSON.*{why}"):
        EngineArgs(model=str(tmp_path)).create_engine_config()
    finding = doctor._fields_of_environment()
    assert finding.state is State.WRONG and why in finding.found


def test_a_trainer_treats_an_empty_key_variable_as_no_key(monkeypatch):
    monkeypatch.setenv(ADMIN_KEY_ENV, "")
    assert admin_key() is None


@pytest.mark.seconds
def test_vllm_serve_shows_the_group():
    done = subprocess.run(
        [*VLLM, "serve", f"--help={GROUP}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for knob in KNOBS:
        assert flag(knob.name) in done.stdout
    assert "--inflight-admin-key" in done.stdout
    # What a knob is when it is not given stands in its help, once.
    assert "(default: None)" not in done.stdout


def test_upstream_knows_the_environment_variables_of_this_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--fail-on-environ-validation` rejects those that it does not know."""
    from vllm import envs
    from vllm.platforms import current_platform

    apply_all()
    validate = vars(envs).get("validate_environ") or current_platform.validate_environ
    known = set(envs.environment_variables)
    for name in os.environ.keys() - known:  # vLLM sets such ones itself
        monkeypatch.delenv(name) if name.startswith("VLLM_") else None
    for name in (CONFIG_ENV, ADMIN_KEY_ENV):
        monkeypatch.setenv(name, "{}")
    validate(True)
    # With such a key the owner believes the routes closed.
    monkeypatch.setenv("VLLM_INFLIGHT_ADMINKEY", "secret")
    with pytest.raises(ValueError, match="VLLM_INFLIGHT_ADMINKEY"):
        validate(True)
    assert set(envs.environment_variables) == known  # caches are named after all
