"""One conformance suite per contract: subclass it in a test module, say how to make your object, and run pytest.

    class TestMyBalancer(LoadBalancerSuite):
        def balancer(self, clock): return MyBalancer(clock)

Every module is imported by itself (`from verl_contracts.testing.suites.balancer import LoadBalancerSuite`), so that a
suite's own needs (torch, hypothesis) are those of its users only.
"""

try:
    import pytest
except ImportError as exc:
    raise ImportError("the conformance suites need pytest: pip install 'verl-contracts[testing]'") from exc

__all__: list[str] = []

_MODULES = (
    "admission",
    "agents",
    "balancer",
    "checkpoint",
    "manager",
    "mode",
    "replica",
    "rewards",
    "runtime",
    "store",
    "tracker",
    "training",
    "weights",
)

pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))
