"""As `test_certified`, for what needs torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from subjects_torch import EstimatorSubject, LossSubject


class TestEstimator(EstimatorSubject):
    pass


class TestLoss(LossSubject):
    pass
