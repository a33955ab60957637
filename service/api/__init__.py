"""HTTP: routes, schemas, server-sent events, limits, one error shape. Sees the rest of the server only through core's
protocols."""

from service.api.application import Doors, build_api, build_startup_api
from service.api.asking import ModelNames
from service.api.limits import Limits
from service.api.page import Feed
from service.api.replies import Replies

__all__ = ["Doors", "Feed", "Limits", "ModelNames", "Replies", "build_api", "build_startup_api"]
