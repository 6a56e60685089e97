"""The control routes of the HTTP server.

They are attached to vLLM's own application and replace upstream's routes of the same
path. With `--inflight-port` they are served on that port alone (control_port.py). Where
a framework adds a route of such a path, its route answers (framework_routes.py). Our
routes need a key or a caller on this host (auth.py). Every error is `{"error": {"code",
"message", …}}` with the status of its kind.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.datastructures import State

from vllm.inflight import upstream
from vllm.inflight.api.compat import framework_routes, pipelinerl, queries, sglang
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.methods import (
    control_of,
    start_draft_weight_update,
    update_weights,
)
from vllm.inflight.api.control.methods import pause_generation as pause_engine
from vllm.inflight.api.control.restore import restore, restore_at_start, tried
from vllm.inflight.api.request import auth, control_port, rate_limit
from vllm.inflight.api.request.body import SMALL_BYTES, parse, parsed, read
from vllm.inflight.api.request.fields import Fields
from vllm.inflight.api.request.refusal import refusal
from vllm.inflight.api.request.schema import FINISHING, OPENING, ROLLING_BACK
from vllm.inflight.api.server.admission import Admission
from vllm.inflight.api.server.health import health
from vllm.inflight.api.server.metrics import metrics
from vllm.inflight.api.server.openapi import TAGS, described, serve_docs_offline
from vllm.inflight.api.server.rollout_routes import ROLLOUT_ROUTES, add_rollout_routes
from vllm.inflight.api.server.start_log import log_start
from vllm.inflight.calls import StartUpdate
from vllm.inflight.errors import InflightError, UpstreamChanged
from vllm.inflight.releases import fields as release_fields
from vllm.inflight.update import MAX_MANIFEST_BYTES

Handler = Callable[[Any, dict[str, Any]], Awaitable[Any]]


class RestOfPath(PathConvertor):
    """The rest of a path: the id of an update may contain any character."""

    regex = r"[\s\S]+"


register_url_convertor("rest", RestOfPath())


def _control(engine: upstream.EngineClient) -> Control:
    return control_of(engine)


async def _pause(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Upstream's `/pause?mode=&clear_cache=`, with all our modes."""
    fields = Fields(body)
    reply: Reply = await pause_engine(
        engine,
        mode=fields.text("mode", "abort"),
        wait_for_inflight_requests=fields.word("wait_for_inflight_requests", None),
        clear_cache=fields.word("clear_cache", None),
        **fields.only(),
    )
    return reply | {"status": "paused"}


async def _pause_generation(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    fields = Fields(body)
    mode, flush = fields.take("mode"), fields.flag("flush_cache", False)
    asked = fields.only("lease_s", "owner")
    return await pause_engine(engine, mode=mode, flush_cache=flush, **asked)


async def _resume(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """End a pause."""
    asked = Fields(body).only("owner")
    return await _control(engine).resume(**asked) | {"status": "resumed"}


async def _is_paused(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Whether decoding is paused, and in which mode."""
    Fields(body).only()
    return await _control(engine).paused()


async def _init(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Connect the configured transport to its trainer."""
    fields = Fields(body)
    info = fields.needed("init_info")
    fields.only()
    await _control(engine).init_transport(info)
    return {"message": "Weight transfer initialized"}


async def _shutdown(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Close the connection to the trainer."""
    Fields(body).only()
    await _control(engine).shutdown_transport()
    return {"message": "Weight transfer shut down"}


async def _start(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Open an update on every engine, or on none."""
    fields = Fields(body)
    fields.settle(release_fields.START)
    return await _control(engine).start(StartUpdate(**fields.described(OPENING)))


async def _start_draft(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Open an update of the drafter alone."""
    return await start_draft_weight_update(engine, **Fields(body).described(OPENING))


async def _update(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Receive a chunk; the reply comes when every rank has it."""
    fields = Fields(body)
    info = {"update_info": fields.needed("update_info")}
    names = ("update_id", "chunk", "owner", "start", "finish")
    return await update_weights(engine, info, **fields.only(*names))


async def _prepare(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Prepare the commit: verify the shadow weights, flip nothing yet."""
    return await _control(engine).prepare(**Fields(body).only("update_id", "owner"))


async def _finish(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Prepare and commit: verify the shadow weights, then flip between two steps."""
    return await _control(engine).finish(**Fields(body).described(FINISHING))


async def _abort(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Abort an update; the live weights do not change."""
    return await _control(engine).abort(**Fields(body).only("update_id", "owner"))


async def _rollback(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Flip back to the rollback target, as fast as a commit."""
    return await _control(engine).rollback(**Fields(body).described(ROLLING_BACK))


async def _restore(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Restore the version from before the restart, from the journal."""
    Fields(body).only()
    return await restore(_control(engine))


async def _status(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """State of one update, or of all known updates."""
    return await _control(engine).status(**Fields(body).only("update_id"))


async def _info(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Version, digest and epoch of the live weights, and the rollback target."""
    Fields(body).only()
    return await _control(engine).info()


async def _world_size(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Number of ranks that a trainer has to reach."""
    parallel = engine.vllm_config.parallel_config
    fields = Fields(body)
    across = fields.word("include_dp", True)
    fields.only()
    return {
        "world_size": parallel.world_size_across_dp if across else parallel.world_size
    }


ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/pause"): _pause,
    ("POST", "/resume"): _resume,
    ("GET", "/is_paused"): _is_paused,
    ("POST", "/pause_generation"): sglang.pausing(_pause_generation),
    ("POST", "/continue_generation"): sglang.continuing(_resume),
    ("POST", "/init_weight_transfer_engine"): _init,
    ("POST", "/shutdown_weight_transfer_engine"): _shutdown,
    ("POST", "/start_weight_update"): _start,
    ("POST", "/start_draft_weight_update"): _start_draft,
    ("POST", "/update_weights"): _update,
    ("POST", "/prepare_weight_update"): _prepare,
    ("POST", "/finish_weight_update"): _finish,
    ("POST", "/abort_weight_update"): _abort,
    ("POST", "/rollback_weights"): _rollback,
    ("POST", "/restore_weights"): _restore,
    ("GET", "/weight_update"): _status,
    ("GET", "/weight_update/{update_id}"): _status,
    ("GET", "/weight_info"): _info,
    ("GET", "/get_world_size"): _world_size,
    **sglang.ROUTES,
    **pipelinerl.ROUTES,
    **queries.ROUTES,
}
"""Every control route: method and path → handler."""

LARGEST_BODY = {"/update_weights_from_tensor": 1 << 30}
"""Path → most bytes of a body, where this is not `MAX_MANIFEST_BYTES`."""


class InflightEndpoints:
    """The endpoint plugin that attaches the routes; see upstream's interface."""

    name = "inflight"
    required_tasks = None
    """None: models of every task can be updated."""

    def attach_router(self, app: FastAPI) -> None:
        """Add our routes; upstream then lets them replace its own."""
        auth.check_api_keys(app.state.args.api_key)
        self._app = app
        self._config = control_port.config_of(app.state.args)
        router = APIRouter(route_class=framework_routes.DeferringRoute)
        if self._config.port:
            paths = {path for _, path in ROUTES}
            app.router.routes[:] = [
                route
                for route in app.routes
                if getattr(route, "path", "") not in paths
                or framework_routes.is_foreign(route)
            ]
        else:
            add_routes(
                router,
                rate_limit.RateLimit(self._config.begin_rate),
                _taken(app, ROUTES),
            )
            app.openapi_tags = [*(app.openapi_tags or ()), *TAGS]
        add_rollout_routes(router, _taken(app, ROLLOUT_ROUTES))
        router.add_api_route("/metrics", metrics, methods=["GET"])
        router.add_api_route(
            "/health", health, methods=["GET"], response_class=Response
        )
        app.include_router(router)
        serve_docs_offline(app)
        app.add_middleware(Admission)

    async def init_state(
        self, engine_client: upstream.EngineClient, state: State, args: Namespace
    ) -> None:
        """Check that our routes answer, since upstream's own routes need no key."""
        is_first = control_port.is_first(engine_client)
        if is_first:
            await log_start(engine_client, args)
        if self._config.journal:
            await (restore_at_start if is_first else tried)(control_of(engine_client))
        if not self._config.port:
            check_routing(self._app)
        elif is_first:
            app = control_app(engine_client, args)
            listener = control_port.bind(self._config.host, self._config.port)
            self._serving = control_port.serve(app, listener, args)


def _taken(app: FastAPI, keys: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of our routes that a framework has added already.

    With our route beside it, upstream would remove the framework's.
    """
    return {key for key in keys if framework_routes.owner(app, *key) is not None}


def add_routes(
    router: APIRouter,
    rates: rate_limit.RateLimit,
    taken: Collection[tuple[str, str]] = (),
) -> None:
    """Add every control route but those `taken`, each with its check of the key.

    `rates` limits how often a caller starts updates.
    """
    for (method, path), handler in ROUTES.items():
        if (method, path) in taken:
            continue
        router.add_api_route(
            path.replace("}", ":rest}"),
            _endpoint(handler, LARGEST_BODY.get(path, MAX_MANIFEST_BYTES), rates),
            methods=[method],
            name=handler.__name__.strip("_"),
            summary=(handler.__doc__ or "").strip().split("\n")[0],
            **described(method, path),
        )


def control_app(engine: upstream.EngineClient, args: Namespace) -> FastAPI:
    """The application of the control port: control routes, health, version, metrics."""
    app = FastAPI(openapi_url=None)
    app.state.engine_client, app.state.args = engine, args
    add_routes(
        app.router, rate_limit.RateLimit(control_port.config_of(args).begin_rate)
    )
    for path, endpoint in {
        "/health": health,
        "/version": upstream.show_version,
        "/metrics": metrics,
    }.items():
        app.add_api_route(path, endpoint, response_class=Response)
    return app


def check_routing(app: FastAPI) -> None:
    """Raise if upstream answers a control path; log where a framework's route does."""
    for method, path in ROUTES:
        if (module := framework_routes.owner(app, method, path)) is not None:
            framework_routes.tell(app, method, path, module)
            continue
        for route in app.routes:
            if getattr(route, "path_format", None) == path and method in (
                getattr(route, "methods", None) or ()
            ):
                if framework_routes.module_of(route) != __name__:
                    raise UpstreamChanged(
                        f"{method} {path} is not answered by vllm-inflight: FastAPI "
                        "no longer lets plugin routes replace earlier ones"
                    )
                break


def _endpoint(
    handler: Handler, largest: int, rates: rate_limit.RateLimit
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            caller = auth.authorize(request)
            if rates.is_limited:
                rate_limit.allowance.set(partial(rates.spend, caller))
            raw = await read(request, largest)
            if len(raw) > SMALL_BYTES:
                is_longer = largest > MAX_MANIFEST_BYTES
                fields = await parsed(raw, has_long_texts=is_longer)
            else:
                fields = parse(raw)
            del raw
            # Path, query and body as one object.
            body = {**request.query_params, **fields, **request.path_params}
            engine = request.app.state.engine_client
            answer = await handler(engine, body)
            return answer if isinstance(answer, Response) else JSONResponse(answer)
        except InflightError as error:
            return refusal(error)

    return endpoint
