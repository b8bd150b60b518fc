"""The control core: admission, the store, the producer and the loop. Plain asyncio, without torch or Ray."""
