"""docs/lightning.md says what the tests show, and no more."""

from __future__ import annotations

from tests.contract import AREAS, DOCUMENT, document, rows


def test_the_table_is_what_the_tests_show() -> None:
    assert DOCUMENT.read_text() == document(rows()), "run `python -m tests.contract`"


def test_every_line_is_on_a_test_and_in_an_area() -> None:
    for row in rows():
        assert row.area in AREAS and row.test.split("::")[1].startswith("test_"), row
