"""The fixture by which every adversarial test records its outcome."""

from __future__ import annotations

import pytest

from tests.adversarial.outcomes import GOOD, PROPERTY, Judge


@pytest.fixture
def judge(record_property: pytest.RecordProperty) -> Judge:
    """`judge(suite, outcome, why)`: count the outcome, and fail where it is a bad one."""

    def record(suite: str, outcome: str, why: object = "") -> None:
        record_property(PROPERTY, (suite, outcome))
        assert outcome in GOOD, f"{outcome}: {why}"

    return record
