"""The references meet their contracts, so that what the broken ones fail at is what was broken in them."""

from __future__ import annotations

from subjects import (
    AdmissionSubject,
    AgentsSubject,
    BalancerSubject,
    RewardSubject,
    StoreSubject,
)


class TestAdmission(AdmissionSubject):
    pass


class TestBalancer(BalancerSubject):
    pass


class TestStore(StoreSubject):
    pass


class TestReward(RewardSubject):
    pass


class TestAgents(AgentsSubject):
    pass
