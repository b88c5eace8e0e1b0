"""The API over a real database: the ASGI app here, a real uvicorn, and a dispatcher's part played by hand."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.app import create_app
from service.client import GradgateClient
from service.domain.validation import FailureDetail
from service.server import Server
from service.settings import Settings
from service.storage import events, queue
from service.storage.queue import Claim
from service.storage.session import Database
from workers.contract import (
    CollectiveOp,
    CollectiveSummary,
    Contributor,
    Deviation,
    DeviationKind,
    DivergenceRow,
    End,
    Judgement,
    NormRow,
    Observation,
    OrderingName,
    Phase,
    Primitive,
    ProbeName,
    Reason,
    ReplicaRow,
    Role,
    StepReport,
    TiedRow,
    TraceRow,
    TrialSummary,
    Verdict,
)


@pytest.fixture(scope="module")
def settings(postgres_url: str) -> Settings:
    return Settings(database_url=postgres_url, host="127.0.0.1", port=0, max_wait_s=3.0, max_world_size=64)


@pytest.fixture(scope="module")
async def app(settings: Settings) -> AsyncIterator[FastAPI]:
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture(scope="module")
async def api(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
        yield client


@dataclass
class Running:
    """A real server in a thread of its own."""

    server: Server
    thread: threading.Thread
    base_url: str

    @property
    def app(self) -> FastAPI:
        return self.server.app

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


def _start_server(settings: Settings) -> Running:
    server = Server(create_app(settings), settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end_s = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < end_s
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    return Running(server, thread, f"http://127.0.0.1:{port}")


@pytest.fixture
def start_server() -> Callable[[Settings], Running]:
    return _start_server


@pytest.fixture(scope="module")
def server(settings: Settings) -> Iterator[Running]:
    running = _start_server(settings)
    yield running
    running.stop()


@pytest.fixture
def own_server(settings: Settings) -> Iterator[Running]:
    """A server that the test may stop, and where waits are long."""
    running = _start_server(settings.model_copy(update={"max_wait_s": 60.0}))
    yield running
    running.stop()


@pytest.fixture
def client(server: Running) -> Iterator[GradgateClient]:
    with GradgateClient(server.base_url) as client:
        yield client


@dataclass
class Dispatcher:
    """Does to the database what a dispatcher does, without a cluster."""

    database: Database

    async def claim(self, validation_id: str, cluster: str = "default") -> Claim:
        while True:
            async with self.database.transaction() as connection:
                claims = await queue.claim(connection, cluster=cluster, dispatcher_id="test", lease_s=60, limit=1)
            assert claims, f"{validation_id} is not in the queue"
            if claims[0].id == validation_id:
                return claims[0]

    async def start(self, validation_id: str, cluster: str = "default") -> Claim:
        claim = await self.claim(validation_id, cluster)
        async with self.database.transaction() as connection:
            assert await queue.mark_running(connection, claim.id, claim.attempt, [{"node": "n0"}], {"claim_s": 0.1})
        return claim

    async def say(self, claim: Claim, event_type: str, data: dict[str, Any]) -> None:
        async with self.database.transaction() as connection:
            assert await events.append(connection, claim.id, event_type, data, attempt=claim.attempt)

    async def complete(self, claim: Claim, num_ranks: int = 2) -> None:
        async with self.database.transaction() as connection:
            assert await queue.complete(
                connection, claim.id, claim.attempt, JUDGEMENT, reports(num_ranks), [{"node": "n0"}], {"step_s": 0.5}
            )

    async def fail(self, claim: Claim) -> None:
        detail = FailureDetail("rank_died", "rank 3 died", world_rank=3, node="n1", phase="dp_sync")
        async with self.database.transaction() as connection:
            assert await queue.fail(connection, claim.id, claim.attempt, detail)

    async def cancel(self, claim: Claim) -> None:
        async with self.database.transaction() as connection:
            assert await queue.cancel(connection, claim.id, claim.attempt)


@pytest.fixture
def dispatcher(database: Database) -> Dispatcher:
    return Dispatcher(database)


_TRIAL = TrialSummary(
    probe=ProbeName.EXACT,
    ordering=OrderingName.BUGGY,
    role=Role.CONTROL,
    misowned_elements=2048,
    predicted_diverged_elements=8192,
    diverged_elements=8192,
    missed_elements=0,
    unexpected_elements=0,
    compared_elements=8192,
    nonfinite_elements=0,
    reference_exceeded_elements=0,
    tied_unequal_elements=4096,
    tied_exceeded_elements=4096,
    tied_max_abs=math.inf,
    reference_max_abs=math.nan,
    max_abs_error=1.5,
    weights_max_abs=0.25,
    replicas_agree=True,
    grad_norm=7969.489067688091,
    grad_norm_max_error=math.inf,
    missing_reports=(),
    ok=True,
)
JUDGEMENT = Judgement(
    Verdict.PASS,
    (Reason("clean", "every subject is clean"),),
    (_TRIAL, replace(_TRIAL, ordering=OrderingName.FIXED, role=Role.SUBJECT, reference_max_abs=None)),
    (Observation("straggler", "world_rank 1 held its peers up", 1),),
    (CollectiveSummary("dp", Primitive.REDUCE_SCATTER, CollectiveOp.SUM, (1, 129), 4, 1040, 0.1 + 0.2, 0, True),),
)


def reports(num_ranks: int) -> list[StepReport]:
    """Two steps of one trial: per rank and step two divergence rows and two trace rows."""
    return [_report(step, world_rank) for step in range(2) for world_rank in range(num_ranks)]


def _report(step: int, world_rank: int) -> StepReport:
    return StepReport(
        trial_index=0,
        probe=ProbeName.EXACT,
        ordering=OrderingName.BUGGY,
        repeat=0,
        step=step,
        world_rank=world_rank,
        dp_rank=world_rank,
        pp_rank=0,
        tp_rank=0,
        divergence=tuple(_divergence(end) for end in (End.WTE, End.LM_HEAD)),
        trace=tuple(TraceRow(phase, End.WTE, 0, 1024, -math.inf, 2.0, "ab") for phase in (Phase.LOCAL, Phase.FINAL)),
        tied=TiedRow(1024, 3, 0.5, 3, 0.0, 1024) if world_rank == 0 else None,
        replica=ReplicaRow("aa", "bb"),
        loss=None,
        seconds={"tie": 0.1},
        grad_norm=NormRow(math.nan, 2.0, 1e-9) if world_rank == 0 else NormRow(2.0, None, None),
        compute_seconds={"forward_backward": 0.1 + 0.2},
    )


def _divergence(end: End) -> DivergenceRow:
    return DivergenceRow(
        end=end,
        owned_elements=1024,
        diverged_elements=1024,
        predicted_elements=1024,
        missed_elements=0,
        unexpected_elements=0,
        nonfinite_elements=0,
        first_diverged=0,
        last_diverged=1023,
        max_abs_error=0.1 + 0.2,
        relative_l2_error=math.inf,
        max_error_over_bound=math.inf,
        ratio_to_expected=math.nan,
        reference_max_abs_error=None,
        reference_exceeded_elements=0,
        min_detectable_share=0.0,
        sum=-math.inf,
        l2=1.0,
        digest="cd",
        deviations=(Deviation(DeviationKind.DROPPED, (Contributor(End.LM_HEAD, 0, 2),), 1, 0.0, math.nan, 0, 512),),
    )
