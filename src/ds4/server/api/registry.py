"""All APIs that the server speaks."""

from __future__ import annotations

from ds4.server.api import chat, completions, messages, responses

APIS = (chat.API, responses.API, completions.API, messages.API)
