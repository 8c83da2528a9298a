"""All APIs that the server speaks."""

from __future__ import annotations

from ds4.server.api import chat

APIS = (chat.API,)
