"""How nearness to published figures is counted."""

from __future__ import annotations

import pytest

from reproduce.figure import EttrAgreement


def test_cells_without_a_published_figure_do_not_count() -> None:
    assert EttrAgreement.of([0.01, None, -0.02], 0.05).cells == 2


def test_a_difference_that_is_the_tolerance_is_within_it() -> None:
    assert EttrAgreement.of([0.964 - 0.954, 0.0102], 0.010).within == 1


def test_signs_do_not_cancel_in_the_mean() -> None:
    found = EttrAgreement.of([0.02, -0.02], 0.05)
    assert found.mean_absolute == pytest.approx(0.02)
    assert found.largest == pytest.approx(0.02)


def test_nothing_published_is_full_agreement_and_no_division_by_zero() -> None:
    assert EttrAgreement.of([None], 0.01).share == 1.0
