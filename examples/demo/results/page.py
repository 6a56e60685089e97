"""The page: demo.html, in one file that needs nothing beside it."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from pathlib import Path
from string import Template

from examples.demo.learning import task
from examples.demo.learning.exam import NUM_PROMPTS
from examples.demo.results.gaps import MARGIN_S
from examples.demo.results.report import Report

PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Weights replaced in flight</title>
<style>
:root { color-scheme: light; --ink: #1f2933; --soft: #616e7c; --line: #e4e7eb; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: #fff;
       max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
p { max-width: 46rem; } .soft { color: var(--soft); }
.tiles { display: grid; gap: 1rem; margin: 2rem 0;
         grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); }
.tile { border: 1px solid var(--line); border-radius: .6rem; padding: 1rem 1.1rem; }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2; }
.tile span { color: var(--soft); font-size: .92rem; }
img { width: 100%; height: auto; margin: .5rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .4rem .8rem .4rem 0;
         border-bottom: 1px solid var(--line); }
td:last-child { text-align: right; }
code { font: .92em ui-monospace, monospace; }
.good { color: #18794e; } .bad { color: #c0262d; }
</style>
<h1>A model that learns while it is being used</h1>
<p class="soft">$streams clients streamed completions without pause while a trainer
improved the model with GRPO and published every step into the running server.</p>
<div class="tiles">$tiles</div>
<h2>Tokens and versions</h2>
<img src="$timeline" alt="Tokens of every stream over time, coloured by version">
<h2>Reward</h2>
<img src="$reward" alt="Reward of rollouts and exams over optimiser steps">
<p>The task: <code>52817&gt;</code> is to be answered with its digits in ascending
order. The model was pre-trained on demonstrations of which most sort the other way
or not at all, so it starts fluent and mostly wrong; only the verifier knows what is
wanted. The exam is $prompts held-out prompts that neither pre-training nor the
trainer has seen, each answered once by the server at temperature 1; intervals are
Wilson's, 95 %. The control is the same run from the same checkpoint, same seed and
same number of steps, in which nothing was published.</p>
<table><tr><th>prompt</th><th>before</th><th>control</th><th>after</th></tr>
$answers</table>
<h2>Everything measured</h2>
<table>$rows</table>
<h2>Goals</h2>
<table>$goals</table>
<h2>How the gaps were measured</h2>
<p>A gap is the time between two arrivals in one stream, seen by the client. It is
counted against a commit if any part of it lies within $margin ms of the moment the
engine says it switched; else against staging if any part of it lies between the call
of <code>publish</code> and the commit; else it is steady. Engine, API server, trainer
and clients share the cores of this host, so all kinds include waiting for a core: what
a commit costs is what its gaps have beyond the others. The control's gaps are those
of the same load without updates. The switch itself is timed inside the engine.</p>
</html>
""")


def write_page(report: Report, out: Path) -> None:
    """Write `out`/demo.html from the report and the pictures in `out`."""
    page = PAGE.substitute(
        streams=report.num_streams,
        tiles=_tiles(report),
        timeline=_embedded(out / "timeline.png"),
        reward=_embedded(out / "reward.png"),
        prompts=NUM_PROMPTS,
        answers=_answers(report),
        rows="".join(_row(name, value) for name, value in report.rows()),
        goals=_goals(report),
        margin=f"{1e3 * MARGIN_S:.0f}",
    )
    (out / "demo.html").write_text(page)


def _tiles(report: Report) -> str:
    facts = report.facts()
    change = f"{facts['reward_before']:.0%} → {facts['reward_after']:.0%}"
    tiles = {
        f"held-out answers right; control {facts['reward_control']:.0%}": change,
        "versions committed while streams ran": facts["versions_committed"],
        "streamed requests failed": (
            f"{facts['requests_failed']} of "
            f"{facts['requests_finished'] + facts['requests_failed']}"
        ),
        "of the streams span two versions or more": f"{facts['spanning_share']:.0%}",
        "longest switch of the weights, in the engine": (
            f"{facts['switch_max_ms']:.1f} ms"
        ),
    }
    tile = '<div class="tile"><b>{}</b><span>{}</span></div>'
    return "".join(tile.format(escape(str(v)), escape(k)) for k, v in tiles.items())


def _answers(report: Report) -> str:
    rows = []
    for prompt in report.before.answers:
        cells = [f"<td><code>{escape(prompt)}</code></td>"]
        for marks in (report.before, report.control, report.after):
            answer = marks.answers[prompt]
            mood = "good" if task.reward(prompt, answer) else "bad"
            cells.append(f'<td><code class="{mood}">{escape(answer)}</code></td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join(rows)


def _goals(report: Report) -> str:
    words = {True: '<span class="good">yes</span>', False: '<b class="bad">no</b>'}
    return "".join(
        f"<tr><td>{escape(goal)}</td><td>{words[is_met]}</td></tr>"
        for goal, is_met in report.goals().items()
    )


def _row(name: str, value: str) -> str:
    return f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>\n"


def _embedded(picture: Path) -> str:
    return f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}"
