"""A stand-in for an engine: its control routes and its ledger, but no model.

It serves files as it is given them, and it misbehaves on demand: connections
that break before or after a call took effect, late replies, refusals.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from base64 import b64decode
from collections import defaultdict
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file

from vllm.inflight.api.request.rate_limit import RateLimit
from vllm.inflight.calls import StartUpdate
from vllm.inflight.engine.transaction import Update
from vllm.inflight.engine.update.ledger import Ledger
from vllm.inflight.errors import (
    InflightError,
    NothingToRollBack,
    OwnedByAnother,
    VersionConflict,
    WeightsMismatch,
    WrongPhase,
)
from vllm.inflight.trainer import Publisher
from vllm.inflight.update import Manifest, Phase, fingerprint

START, UPDATE, FINISH = (
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
BODY = "/update_weights_from_tensor"
PREPARE = "/prepare_weight_update"
ABORT, ROLLBACK = "/abort_weight_update", "/rollback_weights"
STATUS = "/weight_update"
PAUSE, CONTINUE, IS_PAUSED = (
    "/pause_generation",
    "/continue_generation",
    "/is_paused",
)
FROM_DISK = "/update_weights_from_disk"
NAMES = "/weight_names"

UNKNOWN = {"digest": None, "step": None}
"""Facts of a version that this engine may lack, and no real one."""

HELD_S = 120.0
"""That a held reply is late at most: who waits for one is still there then."""

DROP, LOSE, STARTING, PAGE = "drop", "lose", "starting", "page"
"""The connection breaks before the call, or after it; 503; a page of HTML."""


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    """A version of 76 bytes in two tensors."""
    return {"a.weight": torch.full((4, 4), value), "b.weight": torch.full((3,), value)}


def publisher(
    engine: StandIn | list[StandIn], source: Any = None, **options: Any
) -> Publisher:
    """A publisher of `weights()` to one or more stand-ins."""
    options = {"timeout_s": 20} | options  # a test that hangs helps nobody
    urls = [one.url for one in engine] if isinstance(engine, list) else engine.url
    return Publisher(urls, weights() if source is None else source, **options)


class StandIn:
    """An engine that answers on `url` for the length of a `with`.

    Attributes:
        calls: (path, body) of every call that arrived, in order.
        faults: what goes wrong with the next calls of a path, first first.
        delays: seconds by which every reply of a path is late.
        held: paths whose replies wait for an event.
        trickles: paths whose replies come byte by byte, for ten seconds.
        known: names of the model, if it is to refuse others.
        names: what it tells of the tensors that an update may bring.
        rate: how often an update may begin; it is asked first, as in the server.
        served: the tensors that were committed last.
        digest: of what it stages, as it tells it; None: not known.
        base: of what it serves below that.
        dtype: of what it serves, as it tells it; None: not known.

    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, list[str | InflightError]] = defaultdict(list)
        self.delays: dict[str, float] = {}
        self.held: dict[str, threading.Event] = {}
        self.trickles: set[str] = set()
        self.known: set[str] | None = None
        self.names = weights()
        self.rate = RateLimit(0)
        self.served: dict[str, torch.Tensor] = {}
        self.digest: str | None = "0" * 32
        self.base = "start"
        self.dtype: str | None = None
        self.key: str | None = None
        self.version: dict[str, Any] = {
            "weight_version": "default",
            "epoch": 0,
            "committed_at": time.time(),
        }
        self.num_staging = 0
        self.most_staging = 0
        self.pause: dict[str, Any] | None = None
        self.leases_expired = 0
        self._lease_ends = float("inf")
        self._before: Any = None
        self._staged: dict[str, torch.Tensor] = {}
        self._announced: Any = {}
        self._bytes = 0
        self._ledger = Ledger()
        self._lock = threading.Lock()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stand_in._answer(self, {})

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                stand_in._answer(self, json.loads(self.rfile.read(length)))

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """What arrived at `path`."""
        return [body for asked, body in self.calls if asked == path]

    def begin_elsewhere(self) -> str:
        """Another trainer's update, which makes this engine busy."""
        update, _ = self._ledger.start(StartUpdate("elsewhere"), 60.0)
        return update.update_id

    def end_elsewhere(self) -> None:
        """The end of that."""
        self._ledger.move(self._ledger.find("elsewhere"), Phase.ABORTED)

    def commit_elsewhere(self, label: str) -> None:
        """Another trainer's version is served from now on."""
        self._before = (self.version, self.served)
        epoch = self.version["epoch"] + 1
        changed = {"weight_version": label, "epoch": epoch}
        self.version = self.version | changed | {"committed_at": time.time()}

    def pause_state(self) -> dict[str, Any]:
        """The pause, as `/is_paused` tells it, after a look at its lease."""
        if time.monotonic() > self._lease_ends:
            self.leases_expired += 1
            self.continue_()
        pause = self.pause or {"mode": None, "owner": None}
        left = max(0.0, self._lease_ends - time.monotonic())
        return {
            "is_paused": self.pause is not None,
            "mode": pause["mode"],
            "absorbed": False,
            "is_draining": False,
            "for_commit": False,
            "owner": pause["owner"],
            "lease_left_s": None if left == float("inf") else left,
            "leases_expired": self.leases_expired,
            "weights_detail": None,
        }

    def continue_(self) -> None:
        """Somebody continues decoding, or a lease has run out."""
        self.pause, self._lease_ends = None, float("inf")

    # ------------------------------------------------------------- the server
    def _answer(self, handler: Any, body: dict[str, Any]) -> None:
        path = handler.path
        self.calls.append((path, body))
        self.key = handler.headers.get("Authorization")
        fault = self.faults[path].pop(0) if self.faults[path] else None
        if fault == DROP:
            handler.close_connection = True
            return
        if fault in (STARTING, PAGE):
            status = 503 if fault == STARTING else 404
            return _reply(handler, status, b"<html>nobody here</html>")
        try:
            if isinstance(fault, InflightError):
                raise fault
            with self._lock if path not in (UPDATE, BODY) else _Open():
                reply = self._route(path, body)
            status = 200
        except InflightError as error:
            reply, status = {"error": error.to_dict()}, error.status
        if fault == LOSE:
            handler.close_connection = True
            return
        time.sleep(self.delays.get(path, 0))
        if path in self.held:
            self.held[path].wait(HELD_S)
        text = json.dumps(reply).encode()
        if path in self.trickles:
            for _ in range(100):
                handler.wfile.write(b"H")
                time.sleep(0.1)
        _reply(handler, status, text)

    def _route(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        update_id = body.get("update_id")
        if path == START:
            self.rate.spend("trainer")
            update, is_new = self._ledger.start(_start(body), 60.0)
            if is_new:
                stated = body.get("manifest") or {"format": 1}
                self._announced = Manifest.parse(stated).tensors
                self._ledger.move(update, Phase.STAGING)
                self._bytes, self._before = 0, None
            return _state(update)
        if path == UPDATE:
            if "start" in body:
                self._route(START, body["start"])
            reply = self._stage(update_id, body)
            if "finish" in body:
                reply = self._commit(self._ledger.find(update_id), body["finish"])
            return reply
        if path == BODY:
            return self._stage(update_id, body)
        if path == PREPARE:
            update = self._ledger.require(update_id, Phase.STAGING, Phase.COMMITTED)
            update.digest, update.sent, update.base = self.digest, "1" * 32, self.base
            return update.vote()
        if path == FINISH:
            return self._commit(self._ledger.find(update_id), body)
        if path == ABORT:
            update = self._ledger.find(update_id)
            if not self._ledger.move(update, Phase.ABORTED) and (
                update.phase is not Phase.ABORTED
            ):
                raise WrongPhase(f"it is {update.phase.value}")
            return _state(update)
        if path == ROLLBACK:
            if self._before is None:
                raise NothingToRollBack("there was none before")
            label = self._before[0]["weight_version"]
            if body.get("to_version") not in (None, label):
                raise VersionConflict(f"held is {label!r}")
            left = self.version, self.served
            self.version, self.served = self._before
            self.version = self.version | {"epoch": left[0]["epoch"] + 1}
            self._before = left
            return UNKNOWN | self.version
        if path in (PAUSE, CONTINUE):
            owner, state = body["owner"], self.pause_state()
            if None not in (owner, state["owner"]) and owner != state["owner"]:
                raise OwnedByAnother(f"the engine is paused by {state['owner']!r}")
            if path == PAUSE:
                lease_s = body["lease_s"]
                self.pause = {"mode": body["mode"], "owner": owner}
                self._lease_ends = time.monotonic() + (lease_s or float("inf"))
            else:
                self.continue_()
            state = self.pause_state()
            return {
                **{"paused": state["is_paused"], "mode": state["mode"]},
                **{"num_running": 0, "num_waiting": 0, "seconds": 0.001},
                **{"lease_s": state["lease_left_s"], "owner": state["owner"]},
                **{"weight_version": self.version["weight_version"]},
                **{"success": True, "message": "", "status": "ok"},
            }
        if path == IS_PAUSED:
            return self.pause_state()
        if path == FROM_DISK:
            update, is_new = self._ledger.start(_start(body), 60.0)
            if is_new:
                self._ledger.move(update, Phase.STAGING)
                self._ledger.require(update.update_id, Phase.STAGING)
                update.num_chunks = 1
            return self._commit(update, body) | {"update_id": update.update_id}
        if path == "/weight_info":
            told = {"staging": {"dtype": self.dtype}}
            before = {"previous": self._before and self._before[0]}
            return UNKNOWN | self.version | told | before
        if path == NAMES:
            told = [
                {
                    "name": name,
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                }
                for name, tensor in self.names.items()
            ]
            return {"of": "checkpoint", "num_tensors": len(told), "tensors": told}
        if path == STATUS:
            active = self._ledger.active
            # An engine tells twice of an update under way, at two moments.
            told = None if active is None else active.to_dict() | {"stalled_s": 0.1}
            return {
                "active": told,
                "rollback": None,
                "outcomes": [told | {"stalled_s": 0.2}] if told else [],
            }
        report = self._ledger.find(path.rpartition("/")[2]).to_dict()
        return report | {"ranks": [{"bytes": self._bytes}, {"bytes": self._bytes + 1}]}

    def _stage(self, update_id: Any, body: dict[str, Any]) -> dict[str, Any]:
        update = self._ledger.require(update_id, Phase.STAGING)
        if body["chunk"] < update.num_chunks:
            return _state(update)
        self.num_staging += 1
        self.most_staging = max(self.most_staging, self.num_staging)
        staged = _sent(body)
        for name, tensor in staged.items():
            spec = self._announced[name]
            assert (list(spec.shape), spec.dtype) == (
                list(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
            )
            if self.known is not None and name not in self.known:
                self.num_staging -= 1
                self._ledger.move(update, Phase.ABORTED)
                raise WeightsMismatch(f"unknown: {name}", tensors=[name])
            time.sleep(self.delays.get("tensor", 0))
            if "tensor" in self.held:
                self.held["tensor"].wait(HELD_S)
            self._bytes += tensor.nbytes
        before = self._staged if update.num_chunks else {}
        own = {name: tensor.clone() for name, tensor in staged.items()}
        self._staged = before | own
        self.num_staging -= 1
        update.num_chunks += 1
        return _state(update)

    def _commit(self, update: Update, body: dict[str, Any]) -> dict[str, Any]:
        if update.phase is Phase.COMMITTED:
            assert update.result is not None
            return update.result
        self._ledger.require(update.update_id, Phase.STAGING)
        self._ledger.move(update, Phase.STAGED)
        self._ledger.move(update, Phase.COMMITTED)
        epoch = self.version["epoch"] + 1
        self._before = (self.version, self.served)
        self.served = self._staged
        self.version = {
            "weight_version": update.label or f"update-{epoch}",
            "epoch": epoch,
            "digest": "0" * 32,
            "step": update.step,
            "committed_at": time.time(),  # no two engines commit at once
        }
        mode = body.get("mode", "in_place")
        update.result = self.version | {"gap_ms": 0.5, "mode": mode}
        return update.result


def _sent(body: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a chunk: in the body, or in the file that it names."""
    if "serialized_named_tensors" in body:
        (text,) = body["serialized_named_tensors"]
        return load(b64decode(text, validate=True))
    info = body["update_info"]
    return load_file(info.get("path") or Path("/dev/shm") / info["shm"])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Say nothing of trainers that have gone, unlike of what fails here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*_)


class _Open:
    """No lock: staging goes on beside all other calls."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _state(update: Update) -> dict[str, Any]:
    return {"update_id": update.update_id, "phase": update.phase.value}


def _reply(handler: Any, status: int, text: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


def _start(body: dict[str, Any]) -> StartUpdate:
    """The start that a request opens an update with; all of its body counts."""
    known = {field.name for field in fields(StartUpdate)}
    said = {name: value for name, value in body.items() if name in known}
    return StartUpdate(**said, fingerprint=fingerprint(body))
