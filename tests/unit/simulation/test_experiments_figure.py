"""Figures: everything drawn lies inside the frame, and axes say what they should."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from evenhand.simulation.experiments.figure import (
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Figure,
    Point,
    Series,
    scales,
    svg,
    ticks,
)

FIGURE = Figure(
    "Waits & shares",
    Axis("requests/s"),
    Axis("wait (s)", logarithmic=True),
    (
        Series("ours", (Point(1.0, 0.1, (0.5, 1.5), (0.05, 0.2)), Point(20.0, 30.0)), strong=True),
        Series("endless", (Point(2.0, math.inf), Point(3.0, 0.0), Point(4.0, 5.0))),
        Series("bound", (Point(1.0, 2.0), Point(20.0, 2.0)), dashed=True),
    ),
)
SPACE = "{http://www.w3.org/2000/svg}"


def test_everything_lies_inside_the_frame() -> None:
    root = ElementTree.fromstring(svg(FIGURE))
    marks = [mark for mark in root.iter(f"{SPACE}circle") if float(mark.get("cx", "0")) < WIDTH - RIGHT + 1]
    assert len(marks) == 3, "what is endless or not above zero is left out"
    for mark in marks:
        assert LEFT <= float(mark.get("cx", "0")) <= WIDTH - RIGHT
        assert TOP <= float(mark.get("cy", "0")) <= HEIGHT
    for line in root.iter(f"{SPACE}polyline"):
        for pair in line.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert LEFT <= x <= WIDTH - RIGHT
            assert TOP <= y <= HEIGHT


def test_more_is_to_the_right_and_up() -> None:
    x, y = scales(FIGURE)
    assert x.at(1.0) < x.at(10.0) < x.at(20.0)
    assert y.at(0.1) > y.at(1.0) > y.at(10.0)
    assert y.at(1.0) - y.at(10.0) == pytest.approx(y.at(0.1) - y.at(1.0)), "equal factors are equal lengths"
    assert x.at(1e9) <= WIDTH - RIGHT


def test_a_logarithmic_axis_with_a_beginning_draws_zero_there() -> None:
    figure = Figure(
        "x", Axis("x"), Axis("y", True, least=10.0), (Series("a", (Point(1, 0.0), Point(2, 1_000.0))),)
    )
    _, y = scales(figure)
    assert y.at(0.0) == y.at(10.0) == y.from_px
    assert svg(figure).count("<circle") == 3


def test_ticks_are_round_and_few() -> None:
    assert ticks(0.0, 10.0, False) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert ticks(0.09, 12.0, True) == pytest.approx([0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0])
    assert len(ticks(1.0, 1e9, True)) <= 10


def test_light_colours_are_attributes_and_dark_ones_a_style() -> None:
    text = svg(FIGURE)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"<(circle|rect|polygon|line|polyline|text)(?![^>]*(fill|stroke)=)", text)
    assert "Waits &amp; shares" in text
    assert text == svg(FIGURE)


def test_an_empty_figure_is_a_programmer_error() -> None:
    with pytest.raises(AssertionError, match="no value"):
        svg(Figure("x", Axis("x"), Axis("y"), (Series("a", ()),)))
