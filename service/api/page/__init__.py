"""The operators' page at `/`: static files, and the events and history that it shows."""

from service.api.page.feed import Feed
from service.api.page.files import page_files
from service.api.page.routes import page_routes

__all__ = ["Feed", "page_files", "page_routes"]
