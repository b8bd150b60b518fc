"""The conformance kit: suites that any implementation can subclass, and fakes that the suites certify."""

__all__: list[str] = []
