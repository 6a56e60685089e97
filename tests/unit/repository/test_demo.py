"""The demo's verifier, intervals, gaps and clients, and a rehearsal of the demo."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
import torch

from examples.demo import clients
from examples.demo.learning import task
from examples.demo.learning.alphabet import END, PAD, decode, encode, make_tokenizer
from examples.demo.learning.gradient import MAX_AGE, MAX_RATIO, Batch, policy_loss
from examples.demo.results.gaps import MARGIN_S, Spread, Windows, gaps_of, sort_gaps
from examples.demo.results.interval import Interval, wilson
from examples.demo.rollout import Sample, to_samples, token_epochs

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("12578", 1.0),
        ("87521", 0.0),
        ("1257", 0.0),
        ("125788", 0.0),
        ("12578 ", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_the_verifier_wants_the_digits_in_ascending_order(answer, expected):
    assert task.reward("52817>", answer) == expected


class Stream(BaseHTTPRequestHandler):
    """Answers with tokens whose text has what Unicode calls ends of lines."""

    def do_POST(self) -> None:
        span = {"version": "v", "epoch": 1, "start": 0}
        chunks = (
            {
                "text": "a\u2028b\u2029c\u0085d\u000be\u001cf\r\n\n",
                "token_ids": [number],
                "weight_versions": [span | {"end": number + 1}],
            }
            for number in range(clients.NUM_TOKENS)
        )
        lines = (json.dumps({"choices": [c]}, ensure_ascii=False) for c in chunks)
        sent = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()
        self.send_response(200)
        self.end_headers()
        for start in range(0, len(sent), 1000):  # inside of events and of characters
            self.wfile.write(sent[start : start + 1000])
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


async def test_a_client_reads_tokens_whose_text_has_ends_of_lines():
    with HTTPServer(("127.0.0.1", 0), Stream) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            async with httpx.AsyncClient(base_url=url) as client:
                seen = await clients.stream(client, "prompt")
        finally:
            server.shutdown()
            thread.join()
    assert seen["error"] is None
    assert sum(count for _, count in seen["arrivals"]) == clients.NUM_TOKENS
    assert seen["spans"][-1]["end"] == clients.NUM_TOKENS


def test_zeros_and_repeated_digits_are_kept():
    assert task.reward("00301>", "00013") == 1.0
    assert task.reward("00301>", "013") == 0.0


def test_an_answer_counts_only_if_it_ends_and_is_text():
    digits = encode("12578")
    assert decode([*digits, END]) == "12578"
    assert decode(digits) is None
    assert decode([*digits, PAD, END]) is None
    assert decode([*digits, END, END]) is None
    assert decode([]) is None


def test_training_prompts_never_include_an_exam_prompt():
    rng = random.Random(0)
    seen = {task.draw_prompt(rng) for _ in range(5000)}
    exam = task.draw_exam(rng, 500)
    assert len(set(exam)) == 500
    assert seen.isdisjoint(exam)
    assert all(map(task.is_held_out, exam))


def test_about_a_third_of_the_corpus_is_correct():
    rng = random.Random(0)
    prompts = [task.draw_prompt(rng) for _ in range(4000)]
    right = sum(task.reward(p, task.demonstrate(p, rng)) for p in prompts)
    assert 0.25 < right / len(prompts) < 0.36


def test_a_token_is_a_byte():
    tokenizer = make_tokenizer()
    text = "sort 0-9,\n\tÄ €"
    assert tokenizer.encode(text) == encode(text)
    assert tokenizer.decode(encode(text)) == text
    assert tokenizer.eos_token_id == END
    assert tokenizer.pad_token_id == PAD


def test_wilsons_interval_is_that_of_the_tables():
    half = wilson(50, 100)
    assert half.low == pytest.approx(0.4038, abs=1e-4)
    assert half.high == pytest.approx(0.5962, abs=1e-4)
    none = wilson(0, 10)
    assert none.low == 0.0
    assert none.high == pytest.approx(0.2775, abs=1e-4)


def test_intervals_that_touch_count_as_equal():
    low, high = Interval(0.2, 0.1, 0.3), Interval(0.5, 0.3, 0.7)
    assert not low.is_below(high)
    assert low.is_below(Interval(0.5, 0.31, 0.7))
    assert not high.is_below(low)


def test_a_window_is_touched_by_every_interval_that_shares_a_point():
    windows = Windows([(5.0, 6.0), (1.0, 2.0), (1.5, 3.0)])
    assert windows.touch(0.0, 1.0)
    assert windows.touch(2.5, 2.6)
    assert windows.touch(0.0, 9.0)
    assert windows.touch(6.0, 7.0)
    assert not windows.touch(3.1, 4.9)
    assert not windows.touch(6.1, 7.0)
    assert not Windows([]).touch(0.0, 1.0)


def test_a_gap_is_attributed_to_the_commit_or_to_staging_or_to_steady_decoding():
    commit = {"began": 10.0, "committed_at": 11.0}
    near = 11.0 - MARGIN_S
    requests = [
        {"arrivals": [[9.0, 1], [9.5, 1]]},  # steady
        {"arrivals": [[9.5, 1], [10.25, 1], [near - 0.15, 2]]},  # twice staging
        {"arrivals": [[near - 0.05, 1], [11.5, 1]]},  # across the commit
        {"arrivals": [[12.0, 1]]},  # no gap
    ]
    spreads = sort_gaps(requests, [commit])
    assert {kind: spread.count for kind, spread in spreads.items()} == {
        "commit": 1,
        "staging": 2,
        "steady": 1,
    }
    assert spreads["commit"].max_ms == pytest.approx(650)
    assert spreads["steady"].max_ms == pytest.approx(500)


def test_gaps_lie_between_the_arrivals_of_one_stream():
    assert gaps_of([[1.0, 1], [1.5, 3], [4.0, 1]]) == [(1.0, 1.5), (1.5, 4.0)]
    assert gaps_of([]) == []


def test_a_spread_has_the_percentiles_of_its_values():
    spread = Spread.of(n / 1000 for n in range(100, 0, -1))
    assert spread == Spread(count=100, p50_ms=50, p99_ms=99, max_ms=100)
    assert Spread.of([]).count == 0


def test_every_token_knows_its_epoch():
    spans = [
        {"version": "a", "epoch": 3, "start": 0, "end": 2},
        {"version": "b", "epoch": 4, "start": 2, "end": 3},
    ]
    assert token_epochs(spans) == [3, 3, 4]


def test_a_reply_becomes_a_group_that_the_verifier_has_judged():
    choice = {
        "token_ids": [*encode("12578"), END],
        "logprobs": {"token_logprobs": [-0.1] * 6},
        "weight_versions": [{"version": "a", "epoch": 3, "start": 0, "end": 6}],
    }
    (sample,) = to_samples("52817>", {"choices": [choice]})
    assert sample == Sample(
        prompt=encode("52817>"),
        tokens=[*encode("12578"), END],
        logprobs=[-0.1] * 6,
        epochs=[3] * 6,
        reward=1.0,
    )


def answer(text: str, reward: float, epoch: int, logprob: float) -> Sample:
    tokens = [*encode(text), END]
    count = len(tokens)
    return Sample(encode("52>"), tokens, [logprob] * count, [epoch] * count, reward)


class Uniform:
    """A model that finds every token equally likely."""

    def __call__(self, tokens):
        self.logits = torch.zeros(*tokens.shape, 2 * END, requires_grad=True)
        return self


def test_the_loss_truncates_large_ratios_and_excludes_old_answers():
    now = -torch.tensor(2.0 * END).log().item()
    group = [
        answer("25", 1.0, epoch=9, logprob=now - 5),  # much likelier than then
        answer("5", 0.0, epoch=9 - MAX_AGE - 1, logprob=now),  # too old
    ]
    batch = Batch.of([group], epoch=9)
    loss, facts = policy_loss(Uniform(), batch)
    assert batch.tokens.shape == (2, 3 + 3)
    assert facts["left_out"] == pytest.approx(2 / 5)
    assert facts["truncated"] == pytest.approx(3 / 5)
    assert facts["age"] == pytest.approx(2 * (MAX_AGE + 1) / 5)
    # Three tokens of advantage 1 and weight MAX_RATIO, of five in all.
    assert loss.item() == pytest.approx(-3 * MAX_RATIO * now / 5, rel=1e-3)


@pytest.mark.engine
@pytest.mark.slow
def test_a_rehearsal_of_the_demo_ends_well_and_leaves_its_files(tmp_path):
    command = [sys.executable, "-m", "examples.demo", "--out", str(tmp_path)]
    rehearsal = ["--steps", "3", "--pretrain-steps", "20"]
    done = subprocess.run(
        [*command, *rehearsal], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "demo.json").read_text())
    assert facts["versions_committed"] == 3
    assert facts["requests_failed"] == 0
    # The first one tells what the server serves, the second one is whole in that.
    assert [u["is_delta"] for u in facts["updates"]] == [False, False, True]
    sizes = [update["num_bytes"] for update in facts["updates"]]
    assert sizes[0] == 2 * sizes[1] > 4 * sizes[2] == 4 * facts["delta_bytes_mean"]
    page = (tmp_path / "demo.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "$" not in page
    for picture in ("timeline.png", "reward.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
