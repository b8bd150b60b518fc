"""The conformance kit: suites that any implementation can subclass, and fakes that the suites certify."""
