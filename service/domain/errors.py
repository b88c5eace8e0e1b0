"""What the rules of the service refuse. Pure; `code` is stable and reaches the API."""

from __future__ import annotations


class ServiceError(Exception):
    """Root of everything the service refuses on purpose. The message gives the value, the rule and the remedy."""

    code = "service_error"


class IllegalMove(ServiceError):  # noqa: N818 - named for what happened, as the design does
    """A change of state that the state machine does not allow."""

    code = "illegal_move"


class IdempotencyConflict(ServiceError):  # noqa: N818
    """An idempotency key came back with another request."""

    code = "idempotency_conflict"


class KeyNameTaken(ServiceError):  # noqa: N818
    """An API key's name belongs to another key."""

    code = "key_name_taken"


class UnprotectedAddress(ServiceError):  # noqa: N818
    """A server without keys was asked to listen where others reach it."""

    code = "unprotected_address"


class CursorError(ServiceError):
    """A page cursor that this service did not hand out, or handed out for another listing."""

    code = "invalid_cursor"


class NewerSchemaError(ServiceError):
    """The database was migrated by a newer version than this one."""

    code = "newer_schema"


class EmbeddedPostgresError(ServiceError):
    """The embedded database cannot run here."""

    code = "embedded_postgres"
