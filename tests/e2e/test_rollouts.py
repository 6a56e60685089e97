"""SGLang's `/generate` on a real server: its fields, its reply, aborts and updates."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_http_spans import metric
from tests.support.event_stream import events
from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

PROMPT = list(range(30, 60))
MAX_MODEL_LEN = 16384
LONG = {"max_new_tokens": MAX_MODEL_LEN - 100, "ignore_eos": True}
"""Such a request runs until it is aborted, however fast the machine decodes."""
API_KEY = "rollouts"
END = 256
"""The token that ends an output of the tiny model."""


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> list[Path]:
    # Some layers, so that a long output takes a while.
    return [checkpoint(seed, layers=8, positions=MAX_MODEL_LEN) for seed in range(2)]


@pytest.fixture(scope="module")
def running(folders: list[Path]) -> Iterator[Server]:
    flags = ("--inflight-kv-versions", "on", "--max-model-len", str(MAX_MODEL_LEN))
    with Server(folders[0], *flags) as started:
        started.client.timeout = 180
        yield started


@pytest.fixture
def server(running: Server, folders: list[Path]) -> Iterator[Server]:
    """The server on the old weights, without requests."""
    publish(running, folders[0], "old")
    yield running
    running.post("/continue_generation")
    until(lambda: load(running)["num_total_reqs"] == 0)


def publish(server: Server, folder: Path, label: str, **more: Any) -> None:
    body = {"path": str(folder), "weight_version": label} | more
    assert server.post("/update_weights_from_disk", body)["success"]


def load(server: Server) -> dict[str, Any]:
    (found,) = server.client.get("/v1/loads?include=core").json()["loads"]
    return dict(found)


def ask(server: Server, sampling: dict[str, Any] | None = None, **body: Any) -> Any:
    """The reply to a request that is accepted."""
    asked = {"sampling_params": sampling or {}} | body
    if "text" not in body:
        asked = {"input_ids": PROMPT} | asked
    reply = server.client.post("/generate", json=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(server: Server, body: dict[str, Any]) -> str:
    reply = server.client.post("/generate", json=body)
    assert reply.status_code == 400, reply.text
    # SGLang's clients read the message here.
    return str(reply.json()["error"]["message"])


@contextmanager
def under_way(server: Server, count: int = 1, **body: Any) -> Iterator[list[Any]]:
    """Requests that run during the `with` unless they are aborted; their futures."""
    running = num_running(server) + count
    with ThreadPoolExecutor(count) as pool:
        futures = [
            pool.submit(ask, server, LONG, rid=f"r{n}", return_logprob=True, **body)
            for n in range(count)
        ]
        try:
            until(lambda: num_running(server) >= running)
            yield futures
        finally:
            server.post("/abort_request", {"abort_all": True})


def num_running(server: Server) -> int:
    return int(load(server)["num_running_reqs"])


def decode_some(server: Server) -> None:
    """Returns once every request that runs, or was retracted, has a few more tokens.

    A later request has its tokens in the same steps.
    """
    assert (
        len(ask(server, {"max_new_tokens": 8, "ignore_eos": True})["output_ids"]) == 8
    )


# ------------------------------------------------------------------ tokens and text
@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"sampling_seed": 7}, {"seed": 7}),
        ({"temperature": 1.7, "sampling_seed": 7}, {"temperature": 1.7, "seed": 7}),
        ({"top_p": 0.3, "sampling_seed": 7}, {"top_p": 0.3, "seed": 7}),
        ({"top_k": 3, "sampling_seed": 7}, {"top_k": 3, "seed": 7}),
        ({"top_k": -1, "sampling_seed": 7}, {"top_k": -1, "seed": 7}),
        ({"min_p": 0.4, "sampling_seed": 7}, {"min_p": 0.4, "seed": 7}),
        ({"frequency_penalty": 1.5, "temperature": 0},) * 2,
        ({"presence_penalty": 1.5, "temperature": 0},) * 2,
        ({"repetition_penalty": 1.9, "temperature": 0},) * 2,
        ({"temperature": 0, "logit_bias": {"90": 100.0}},) * 2,
        ({"temperature": 0, "skip_special_tokens": False},) * 2,
        ({"temperature": 0, "spaces_between_special_tokens": False},) * 2,
    ],
    ids=str,
)
def test_the_tokens_and_logprobs_are_those_of_the_completions_route(
    server: Server, here: dict[str, Any], there: dict[str, Any]
) -> None:
    more = {"max_new_tokens": 24, "ignore_eos": True}
    ours = ask(server, here | more, return_logprob=True)
    body = {"model": "tiny", "prompt": PROMPT, "logprobs": 0, "return_token_ids": True}
    theirs = server.post(
        "/v1/completions", body | there | {"max_tokens": 24, "ignore_eos": True}
    )
    (choice,) = theirs["choices"]
    assert ours["output_ids"] == choice["token_ids"]
    assert ours["text"] == choice["text"]
    said = ours["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in said] == choice["token_ids"]
    told = choice["logprobs"]["token_logprobs"]
    assert [logprob for logprob, _, _ in said] == pytest.approx(told)
    assert ours["meta_info"]["weight_versions"] == choice["weight_versions"]


def test_a_text_is_tokenized_as_a_prompt_of_completions(server: Server) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 8}
    body = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 8}
    theirs = server.post("/v1/completions", body)
    ours = ask(server, greedy, text="hello")
    assert ours["text"] == theirs["choices"][0]["text"]
    assert ours["meta_info"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]


def test_a_reply_has_what_sglangs_has(server: Server) -> None:
    reply = ask(server, {"max_new_tokens": 5, "ignore_eos": True}, rid="a")
    meta = reply["meta_info"]
    assert reply.keys() == {"text", "output_ids", "meta_info"}
    assert meta["e2e_latency"] > 0
    epoch = meta["weight_versions"][0]["epoch"]
    assert {k: v for k, v in meta.items() if k != "e2e_latency"} == {
        "id": "a",
        "finish_reason": {"type": "length", "length": 5},
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 5,
        "cached_tokens": 0,
        "weight_version": "old",
        "weight_versions": [{"version": "old", "epoch": epoch, "start": 0, "end": 5}],
        "kv_versions": [
            {"version": "old", "epoch": epoch, "start": 0, "end": len(PROMPT) + 5 - 1}
        ],
    }


def test_a_prompt_that_is_in_the_prefix_cache_is_counted(server: Server) -> None:
    prompt = list(range(3, 103))
    for cached in (0, 96):
        reply = ask(server, {"max_new_tokens": 1}, input_ids=prompt)
        assert reply["meta_info"]["cached_tokens"] == cached
        salted = ask(server, {"max_new_tokens": 1}, input_ids=prompt, cache_salt="s")
        assert salted["meta_info"]["cached_tokens"] == cached


def test_max_new_tokens_has_sglangs_default_and_null_is_the_models_length(
    server: Server,
) -> None:
    assert len(ask(server, {"ignore_eos": True})["output_ids"]) == 128
    prompt = [5] * (MAX_MODEL_LEN - 20)
    limit = {"ignore_eos": True, "max_new_tokens": None}
    assert len(ask(server, limit, input_ids=prompt)["output_ids"]) == 20


def test_why_a_reply_has_ended_is_told_as_sglang_tells_it(server: Server) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    reply = ask(server, greedy)
    ids, text = reply["output_ids"], reply["text"]
    stopped = ask(server, greedy | {"stop_token_ids": [ids[9], None]})
    at = ids.index(ids[9]) + 1
    assert stopped["output_ids"] == ids[:at]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[9]}
    word = next(c for c in text[6:] if c.isprintable() and c != "\ufffd")
    cut = ask(server, greedy | {"stop": word})
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert cut["text"] == text[: text.index(word)]
    kept = ask(server, greedy | {"stop": [word], "no_stop_trim": True})
    assert kept["text"] == cut["text"] + word
    late = ask(server, greedy | {"stop_token_ids": [ids[9]], "min_new_tokens": 30})
    assert len(late["output_ids"]) >= 30


def test_the_models_own_end_token_is_what_matched(server: Server) -> None:
    reply = ask(server, {"logit_bias": {str(END): 100.0}, "temperature": 0})
    assert reply["output_ids"] == [END]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}


@pytest.mark.parametrize(
    "limit",
    [
        {"regex": "[ab]{3}"},
        {"json_schema": json.dumps({"type": "array", "maxItems": 0})},
        {"ebnf": 'root ::= "aba"'},
    ],
    ids=str,
)
def test_constraints_become_structured_outputs(
    server: Server, limit: dict[str, Any]
) -> None:
    text = ask(server, limit | {"max_new_tokens": 256})["text"]
    if "json_schema" in limit:
        assert json.loads(text) == []
    else:
        assert len(text) == 3 and set(text) <= {"a", "b"}


# ------------------------------------------------------------------------- logprobs
def test_log_probabilities_of_the_prompt_begin_where_they_are_asked_for(
    server: Server,
) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 1}
    told = server.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    whole = ask(
        server,
        {"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    )["meta_info"]
    said = whole["input_token_logprobs"]
    assert [token for _, token, _ in said] == PROMPT
    assert said[0][0] is None
    for (logprob, token, text), their in zip(said[1:], told[1:], strict=True):
        assert logprob == pytest.approx(their[str(token)]["logprob"])
        assert text == their[str(token)]["decoded_token"]
    tops = whole["input_top_logprobs"]
    assert tops[0] is None and len(tops) == len(PROMPT)
    for ((_, token, _),), their in zip(tops[1:], told[1:], strict=True):
        assert their[str(token)]["rank"] == 1
    late = ask(
        server, {"max_new_tokens": 1}, return_logprob=True, logprob_start_len=20
    )["meta_info"]["input_token_logprobs"]
    assert [e[:2] for e in late[1:]] == [e[:2] for e in said[21:]]
    assert late[0][:2] == [None, PROMPT[20]]
    none = ask(server, {"max_new_tokens": 1}, return_logprob=True)["meta_info"]
    assert none["input_token_logprobs"] == []


def test_a_request_for_no_tokens_scores_its_prompt(server: Server) -> None:
    """As on-policy distillation asks its teacher."""
    reply = ask(server, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    meta = reply["meta_info"]
    assert (reply["text"], reply["output_ids"]) == ("", [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert (meta["completion_tokens"], meta["weight_versions"]) == (0, [])
    assert meta["weight_version"] == "old"
    assert len(meta["input_token_logprobs"]) == len(PROMPT)
    assert meta["output_token_logprobs"] == []


def test_the_likeliest_tokens_and_the_wanted_ones_are_reported(server: Server) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    text = {"return_logprob": True, "return_text_in_logprobs": True}
    reply = ask(server, greedy, top_logprobs_num=3, **text)
    meta = reply["meta_info"]
    assert len(meta["output_top_logprobs"]) == 6
    for tops, own in zip(
        meta["output_top_logprobs"], meta["output_token_logprobs"], strict=True
    ):
        assert tops[0] == own and len(tops) == 3
        assert [e[0] for e in tops] == sorted((e[0] for e in tops), reverse=True)
    assert all(isinstance(e[2], str) for e in meta["output_token_logprobs"])
    wanted = [meta["output_top_logprobs"][0][1][1], 3]
    chosen = ask(server, greedy, token_ids_logprob=wanted, return_logprob=True)
    said = chosen["meta_info"]["output_token_ids_logprobs"]
    assert all([e[1] for e in each] == wanted for each in said)
    assert said[0][0][0] == pytest.approx(meta["output_top_logprobs"][0][1][0])


# -------------------------------------------------------------------- batch and n
def test_a_batch_is_a_list_in_the_order_of_its_prompts(server: Server) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    prompts = [PROMPT, PROMPT[5:], PROMPT[9:]]
    alone = [ask(server, greedy, input_ids=each)["output_ids"] for each in prompts]
    batch = ask(server, greedy, input_ids=prompts, rid="b")
    assert [each["output_ids"] for each in batch] == alone
    assert [each["meta_info"]["id"] for each in batch] == ["b_0", "b_1", "b_2"]
    own = ask(
        server,
        input_ids=prompts,
        rid=["x", "y", "z"],
        sampling_params=[greedy | {"max_new_tokens": n} for n in (1, 2, 3)],
        return_logprob=[True, False, True],
        top_logprobs_num=[0, 0, 2],
        token_ids_logprob=[[4], None, None],
    )
    assert [each["meta_info"]["id"] for each in own] == ["x", "y", "z"]
    assert [each["output_ids"] for each in own] == [
        each[:n] for n, each in enumerate(alone, 1)
    ]
    first, second, third = (each["meta_info"] for each in own)
    assert "output_token_logprobs" not in second
    assert len(first["output_token_ids_logprobs"]) == 1
    assert len(third["output_top_logprobs"]) == 3
    (one,) = ask(server, greedy, text=["hello"])
    assert one["text"] == ask(server, greedy, text="hello")["text"]


def test_choices_follow_their_prompt(server: Server) -> None:
    sampling = {"n": 3, "max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 3}
    replies = ask(server, sampling, input_ids=[PROMPT, PROMPT[5:]])
    assert [e["meta_info"]["prompt_tokens"] for e in replies] == [30] * 3 + [25] * 3
    assert len({tuple(each["output_ids"]) for each in replies[:3]}) == 3
    body = {"model": "tiny", "prompt": PROMPT, "n": 3, "seed": 3, "max_tokens": 8}
    body |= {"ignore_eos": True, "return_token_ids": True}
    theirs = server.post("/v1/completions", body)["choices"]
    assert [e["output_ids"] for e in replies[:3]] == [c["token_ids"] for c in theirs]


# -------------------------------------------------------------------------- streams
def test_each_event_of_a_stream_has_the_whole_output_so_far(server: Server) -> None:
    greedy = LONG | {"temperature": 0}
    body = {"input_ids": PROMPT, "sampling_params": greedy, "stream": True}
    body |= {"return_logprob": True, "rid": "s"}
    told = []
    with server.client.stream("POST", "/generate", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for event in events(reply):
            told.append(event)
            if len(told) == 9:  # an event may have any number of tokens
                server.post("/abort_request", {"rid": "s"})
    for before, after in pairwise(told):
        count = before["meta_info"]["completion_tokens"]
        assert after["output_ids"][:count] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["weight_versions"][-1]["end"] == count
        assert before["meta_info"]["output_token_logprobs_length"] == count
    assert told[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    some = greedy | {"max_new_tokens": len(told[-1]["output_ids"])}
    whole = ask(server, some, return_logprob=True)
    assert told[-1]["output_ids"] == whole["output_ids"]
    assert told[-1]["text"] == whole["text"]
    ours = told[-1]["meta_info"]["output_token_logprobs"]
    theirs = whole["meta_info"]["output_token_logprobs"]
    assert [e[1] for e in ours] == [e[1] for e in theirs]
    assert "index" not in told[-1]


def test_the_last_event_of_a_stream_says_why_it_has_ended(server: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    with server.client.stream("POST", "/generate", json=body) as reply:
        *_, last = events(reply)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert last["output_ids"] == ask(server, sampling)["output_ids"]


def test_a_stream_of_a_batch_names_the_choice_of_each_event(server: Server) -> None:
    sampling = {"n": 2, "max_new_tokens": 9, "ignore_eos": True}
    body = {"input_ids": [PROMPT, PROMPT[5:]], "sampling_params": sampling}
    with server.client.stream(
        "POST", "/generate", json=body | {"stream": True}
    ) as reply:
        told = list(events(reply))
    last = {event["index"]: event for event in told}
    assert sorted(last) == [0, 1, 2, 3]
    assert all(len(event["output_ids"]) == 9 for event in last.values())
    lengths = [last[n]["meta_info"]["prompt_tokens"] for n in range(4)]
    assert lengths == [30, 30, 25, 25]


def test_a_stream_that_is_rejected_has_the_status_of_its_error(server: Server) -> None:
    body = {"input_ids": [10**6], "stream": True}
    assert "vocabulary" in refused(server, body)


def test_a_client_that_leaves_ends_its_requests(server: Server) -> None:
    body = {"input_ids": PROMPT, "sampling_params": LONG}
    before = metric(server, "generation_tokens_total")
    server.post_and_leave("/generate", body)
    until(lambda: load(server)["num_total_reqs"] == 0)
    with server.client.stream(
        "POST", "/generate", json=body | {"stream": True}
    ) as reply:
        next(events(reply))
    until(lambda: load(server)["num_total_reqs"] == 0)
    sampled = metric(server, "generation_tokens_total") - before
    assert sampled < LONG["max_new_tokens"], "they ran to their end"


# ------------------------------------------------------------- aborts and updates
def test_an_aborted_request_returns_what_it_has_as_sglang_does(server: Server) -> None:
    with under_way(server, 2) as (first, second):
        until(lambda: load(server)["num_used_tokens"] > 128)
        assert server.post("/abort_request", {"rid": "r0"})["num_aborted"] == 1
        partial = first.result()
        decode_some(server)
        assert not second.done()
        assert server.post("/abort_request", {"rid": "r1"})["num_aborted"] == 1
    for reply in (partial, second.result()):
        meta = reply["meta_info"]
        spans = meta["weight_versions"]
        count = len(reply["output_ids"])
        assert count == meta["completion_tokens"] == spans[-1]["end"]
        assert count == len(meta["output_token_logprobs"]) > 0
        assert meta["finish_reason"]["type"] == "abort"


def test_a_partial_rollout_goes_on_from_its_tokens(server: Server) -> None:
    """As slime's partial rollouts do: abort all, update, send prompt and tokens."""
    greedy = LONG | {"temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, greedy)
        until(lambda: load(server)["num_used_tokens"] > 128)
        server.post("/abort_request", {"abort_all": True})
        had = asked.result()["output_ids"]
    assert had
    left = greedy | {"max_new_tokens": 100}
    more = ask(server, left, input_ids=PROMPT + had)["output_ids"]
    whole = ask(server, greedy | {"max_new_tokens": len(had)})["output_ids"]
    assert had == whole
    assert len(more) == 100


def test_a_request_that_waits_is_aborted_without_tokens(server: Server) -> None:
    server.post("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, LONG, rid="w", return_logprob=True)
        until(lambda: load(server)["num_waiting_reqs"] == 1)
        server.post("/abort_request", {"rid": "w"})
        reply = asked.result()
    assert (reply["text"], reply["output_ids"]) == ("", [])
    meta = reply["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert (meta["weight_version"], meta["weight_versions"]) == ("old", [])
    assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_the_version_of_a_reply_is_the_last_and_its_spans_tell_the_rest(
    server: Server, folders: list[Path], mode: str
) -> None:
    with under_way(server) as (asked,):
        until(lambda: load(server)["num_used_tokens"] > 64)
        publish(server, folders[1], "new", mode=mode)
        decode_some(server)
        assert not asked.done()
        server.post("/abort_request", {"rid": "r0"})
        meta = asked.result()["meta_info"]
    first, last = meta["weight_versions"]
    assert (first["version"], last["version"]) == ("old", "new")
    assert (first["start"], first["end"]) == (0, last["start"])
    assert meta["weight_version"] == "new"
    count = meta["completion_tokens"]
    assert last["end"] == count == len(meta["output_token_logprobs"])


def test_a_pause_freezes_a_rollout_and_continue_lets_it_finish(server: Server) -> None:
    short = {"max_new_tokens": 600, "ignore_eos": True}
    with under_way(server) as (asked,), ThreadPoolExecutor(1) as pool:
        server.post("/pause_generation", {"mode": "retract"})
        late = pool.submit(ask, server, short)
        until(lambda: load(server)["num_waiting_reqs"] == 2)
        assert load(server)["num_used_tokens"] == 0
        assert not asked.done() and not late.done()
        server.post("/continue_generation")
        assert len(late.result()["output_ids"]) == 600
        assert not asked.done()
    assert len(asked.result()["output_ids"]) >= 600


def test_a_commit_that_aborts_returns_partial_rollouts(
    server: Server, folders: list[Path]
) -> None:
    with under_way(server, 2) as asked:
        until(lambda: load(server)["num_used_tokens"] > 128)
        publish(server, folders[1], "new", mode="abort")
        metas = [each.result()["meta_info"] for each in asked]
    assert [m["finish_reason"]["type"] for m in metas] == ["abort", "abort"]
    assert all(m["weight_version"] == "old" for m in metas)


# ----------------------------------------------------------------------- rejections
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "'text' or 'input_ids'"),
        ({"text": "a", "input_ids": [1]}, "'text' or 'input_ids'"),
        ({"text": ""}, "text"),
        ({"text": ["a", 3]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, "a"]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": [10**6]}, "vocabulary"),
        ({"input_ids": [5] * (MAX_MODEL_LEN + 1)}, str(MAX_MODEL_LEN)),
        ({"image_data": ["aGk="]}, "image_data"),
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"return_indexer_topk": True}, "return_indexer_topk"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
        ({"return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"session_params": {"id": "a"}}, "session_params"),
        ({"priority": 3}, "priority"),
        ({"lora_path": "who"}, "lora_path 'who'"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"rid": 3}, "rid"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"stream": "yes"}, "stream"),
        ({"return_logprob": 3}, "return_logprob"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"return_logprob": True, "top_logprobs_num": 10**6}, "logprobs"),
        ({"return_logprob": True, "logprob_start_len": 31}, "logprob_start_len"),
        ({"return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        (
            {"return_logprob": True, "token_ids_logprob": [1], "top_logprobs_num": 1},
            "top_logprobs_num",
        ),
        (
            {"return_logprob": True, "token_ids_logprob": [1], "logprob_start_len": 0},
            "logprob_start_len",
        ),
        ({"return_logprob": [True, False]}, "return_logprob has 2 entries"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"data_parallel_rank": 7}, "data_parallel_rank"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_rejected_by_name(
    server: Server, body: dict[str, Any], named: str
) -> None:
    is_whole = not body or "text" in body or "input_ids" in body
    asked = body if is_whole else {"input_ids": PROMPT} | body
    assert named in refused(server, asked)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": "9"}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n must"),
        ({"n": 17}, "sampling_params.n"),
        ({"presence_penalty": 9}, "presence_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"sampling_seed": 1 << 63}, "64 bits"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [10**6], "min_new_tokens": 2}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"regex": "("}, "regex"),
        ({"regex": "a", "ebnf": "b"}, "regex"),
        ({"custom_params": {"a": 1}}, "custom_params"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"no_such": 1}, "no_such"),
    ],
    ids=str,
)
def test_a_wrong_sampling_parameter_is_rejected_by_name(
    server: Server, sampling: dict[str, Any], named: str
) -> None:
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    assert named in refused(server, body)
    assert server.client.get("/health").status_code == 200


def test_a_field_that_asks_for_nothing_is_accepted(server: Server) -> None:
    """As slime and miles send them with their defaults."""
    reply = ask(
        server,
        {"max_new_tokens": 2, "stop": None, "stop_token_ids": None, "regex": None},
        return_routed_experts=False,
        return_indexer_topk=False,
        image_data=None,
        log_metrics=True,
        session_id="a",
    )
    assert 0 < len(reply["output_ids"]) <= 2


def test_a_page_of_another_site_cannot_send_a_request(server: Server) -> None:
    content = json.dumps({"input_ids": PROMPT})
    headers = {"Content-Type": "text/plain"}
    reply = server.client.post("/generate", content=content, headers=headers)
    assert reply.status_code == 400
    assert "Content-Type" in reply.json()["message"]


# -------------------------------------------------------------------- load, health
def test_the_load_of_the_engine_is_what_runs_and_waits(server: Server) -> None:
    idle = load(server)
    assert (idle["num_total_reqs"], idle["num_used_tokens"]) == (0, 0)
    assert idle["max_running_requests"] == 16
    assert idle["max_total_num_tokens"] == 32768
    with under_way(server, 3):
        whole = server.client.get("/v1/loads").json()
        assert whole["aggregate"]["total_running_reqs"] == 3
        assert whole["dp_rank_count"] == 1
        assert whole["loads"][0]["num_used_tokens"] > 0
        (old,) = server.client.get("/get_load").json()
        assert (old["num_reqs"], old["num_waiting_reqs"]) == (3, 0)
        server.post("/abort_request", {"abort_all": True})
    assert server.client.get("/v1/loads?dp_rank=0").status_code == 200
    assert server.client.get("/v1/loads?dp_rank=1").status_code == 400
    assert server.client.get("/v1/loads?dp_rank=a").status_code == 400
    assert server.client.get("/v1/loads?format=prometheus").status_code == 400


def test_a_healthy_engine_generates_a_token(server: Server) -> None:
    def generated() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        name = "vllm:generation_tokens_total{"
        return sum(float(e.split()[-1]) for e in lines if e.startswith(name))

    before = generated()
    for method in ("GET", "POST"):
        assert server.client.request(method, "/health_generate").status_code == 200
    assert generated() == before + 2
    with under_way(server):
        assert server.client.get("/health_generate").status_code == 200
        server.post("/abort_request", {"abort_all": True})


def test_health_checks_at_the_same_time_share_a_token(server: Server) -> None:
    barrier = threading.Barrier(4)

    def check(_: int) -> int:
        barrier.wait()
        return int(server.client.get("/health_generate").status_code)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(check, range(4))) == {200}


def test_a_paused_engine_is_healthy(server: Server) -> None:
    server.post("/pause_generation", {"mode": "in_place"})
    reply = server.client.get("/health_generate")
    assert (reply.status_code, reply.json()) == (
        200,
        {"detail": "the engine is paused"},
    )


def test_post_processing_has_nothing_to_do(server: Server, folders: list[Path]) -> None:
    for flag in ("restore_weights_before_load", "post_process_quantization"):
        reply = server.post("/post_process_weights", {flag: True})
        assert reply["success"] is True
    assert server.client.get("/weight_version").json() == {"weight_version": "old"}


# ----------------------------------------------------------------------------- keys
def test_a_rollout_needs_the_api_key_and_not_the_admin_key(folders: list[Path]) -> None:
    with Server(
        folders[0],
        *("--api-key", API_KEY, "--inflight-when-paused", "reject"),
        key="admin",
    ) as server:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        own = {"Authorization": f"Bearer {API_KEY}"}

        def status(path: str, key: str | None) -> int:
            headers = {"Authorization": f"Bearer {key}" if key else ""}
            method = "POST" if path == "/generate" else "GET"
            asked = body if method == "POST" else None
            reply = server.client.request(method, path, json=asked, headers=headers)
            return int(reply.status_code)

        for path in ("/generate", "/v1/loads", "/get_load"):
            assert status(path, API_KEY) == 200
            assert status(path, None) == 401
            assert status(path, "admin") in (401, 403)
        assert status("/health_generate", None) == 200
        server.post("/pause_generation", {"mode": "in_place"})
        reply = server.client.post("/generate", json=body, headers=own)
        assert reply.status_code == 503
        assert "Retry-After" in reply.headers
