import asyncio
from __future__ import annotations
