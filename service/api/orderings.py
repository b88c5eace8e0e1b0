"""GET /orderings: the catalogue, as the workers run it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.api.access import Reader
from service.api.documents import Document, json_response
from service.api.openapi import protected
from workers.contract import OrderingName, Role
from workers.layout import LayoutVersion
from workers.orderings import ORDERINGS, SyncPhase

router = APIRouter(tags=["analysis"])


class OrderingDocument(Document):
    """A named pair of buffer layout and sequence of sync phases."""

    name: OrderingName
    layout: LayoutVersion
    """The Megatron version whose buffer layout it uses."""
    phases: list[SyncPhase]
    distributed_optimizer: bool
    role: Role
    """A control must diverge where predicted; a subject must be clean."""
    bit_tied: bool
    """Whether both ends must agree to the bit."""
    source: str
    summary: str
    expectation: str


class OrderingCatalogue(Document):
    """Every ordering that a validation can run."""

    items: list[OrderingDocument]


@router.get(
    "/orderings",
    operation_id="listOrderings",
    summary="The catalogue of orderings",
    response_model=OrderingCatalogue,
    responses=protected(),
)
async def list_orderings(request: Request, _: Reader) -> Response:
    """Each ordering: its buffer layout, its sync phases, where it comes from and what to expect."""
    fields = tuple(OrderingDocument.model_fields)
    items = [{field: getattr(ordering, field) for field in fields} for ordering in ORDERINGS.values()]
    return json_response(request, {"items": items})
