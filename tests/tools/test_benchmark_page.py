"""Tests that the page of benchmarks comes only from a run's results: every number of its tables and plots; that
missing measurements are marked, and that the plots are well-formed."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.plots import bars, number, ranges
from benchmarks.publish import TEMPLATE, Results, TemplateError, publish, read_results
from benchmarks.report import Result, Table, Verdict, document_of, write_json

SVG = "{http://www.w3.org/2000/svg}"


def results_of(*results: Result, directory: Path, quick: bool = False) -> Results:
    """Return results like those from the file of `--json`."""
    path = directory / "results.json"
    write_json(path, document_of({"cores": 2}, {"pgoutbox": "0.1.0", "pgqueuer": "1.6.0"}, results, quick=quick))
    return read_results(path)


def drain() -> Result:
    return Result(
        "drain",
        settings={"messages": 50_000},
        tables=[Table("the drain", ("variant", "messages/s"), [("pgoutbox", 41_234.5), ("a|b <c>", 18_800.0)])],
        verdicts=[Verdict("pgoutbox / pgqueuer", 1.5, 2.0, "at least"), Verdict("memory", 51, 80, "at most", "MiB")],
        notes=["one peer is left out"],
    )


def test_every_placeholder_is_replaced_by_a_result(tmp_path: Path) -> None:
    names = ("machine", "versions", "settings drain", "table drain 0", "verdicts drain", "notes drain")
    template = "\n\n".join(f"{{{{{name}}}}}" for name in names)
    page = tmp_path / "docs" / "page.md"

    publish(results_of(drain(), directory=tmp_path), page, template)

    text = page.read_text()
    assert "{{" not in text
    for expected in (
        "The machine: cores 2.",
        "Versions: pgoutbox 0.1.0, pgqueuer 1.6.0.",
        "- messages: 50,000",
        "| pgoutbox | 41,200 |",
        "| a\\|b <c> | 18,800 |",
        "Targets met: 1 of 2. Missed:\n\n- pgoutbox / pgqueuer: 1.5 x (at least 2 x)\n",
        "- one peer is left out",
    ):
        assert expected in text


def test_a_table_can_be_reduced_to_some_columns(tmp_path: Path) -> None:
    page = tmp_path / "page.md"

    publish(results_of(drain(), directory=tmp_path), page, "{{table drain 0 1}}")

    assert page.read_text() == "| messages/s |\n| --- |\n| 41,200 |\n| 18,800 |\n"


def test_each_plot_is_a_file_beside_the_page_that_shows_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"

    written = publish(results_of(drain(), directory=tmp_path), page, "{{bars drain 0 1 drain.svg}}")

    assert written == [page, tmp_path / "img" / "drain.svg"]
    assert page.read_text() == "![the drain](img/drain.svg)\n"
    assert ET.parse(written[1]).getroot().tag == f"{SVG}svg"


def test_a_missing_scenario_is_reported_once_for_neighbouring_numbers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"

    publish(results_of(directory=tmp_path), page, "Before.\n\n{{table drain 0}}\n\n{{verdicts drain}}\n\nAfter.")

    assert page.read_text() == "Before.\n\n*Not measured in this run.*\n\nAfter.\n"


def test_a_scenario_that_is_not_measured_again_keeps_its_numbers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    template = "Before.\n\n{{table drain 0}}\n\n{{verdicts drain}}\n\nBetween.\n\n{{notes wal}}\n\nAfter.\n"
    publish(results_of(drain(), directory=tmp_path), page, template)
    drained = page.read_text().split("Between.")[0]

    publish(results_of(Result("wal", settings={}, notes=["new"]), directory=tmp_path), page, template)

    assert page.read_text() == f"{drained}Between.\n\n- new\n\nAfter.\n"
    with pytest.raises(TemplateError, match="has other texts than the template"):
        publish(results_of(directory=tmp_path), page, template.replace("Between", "In between"))
    assert "- new" in page.read_text()


def test_the_numbers_of_a_quick_run_are_marked_as_meaningless(tmp_path: Path) -> None:
    page = tmp_path / "page.md"

    publish(results_of(directory=tmp_path, quick=True), page, "{{machine}}")
    assert "no number of it means anything" in page.read_text()

    publish(results_of(directory=tmp_path), page, "{{machine}}")
    assert "no number of it means anything" not in page.read_text()


@pytest.mark.parametrize(
    "template", ["{{table drain 7}}", "{{nonsense drain}}", "{{nonsense}}", "in the text: {{machine}}"]
)
def test_an_error_in_the_template_is_reported_and_no_page_is_written(tmp_path: Path, template: str) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(TemplateError):
        publish(results_of(drain(), directory=tmp_path), page, template)
    assert not page.exists()


def test_the_template_uses_only_existing_scenarios() -> None:
    from benchmarks.__main__ import SCENARIOS

    asked = set(
        re.findall(r"^\{\{(?:settings|notes|verdicts|table|bars|ranges) (\w+)", TEMPLATE.read_text(), re.MULTILINE)
    )
    assert asked == set(SCENARIOS)


def test_an_invalid_results_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"machine": {}}))
    with pytest.raises(SystemExit, match=r"other\.json is not a result of a run: quick, scenarios, versions missing"):
        read_results(path)


def test_bars_are_proportional_and_pgoutbox_is_highlighted() -> None:
    root = ET.fromstring(bars("rates <&>", [("pgoutbox", 40.0), ("other & sons", 10.0), ("none", float("nan"))]))

    rectangles = root.findall(f"{SVG}rect")
    widths = [float(rectangle.attrib["width"]) for rectangle in rectangles]
    assert [rectangle.attrib["class"] for rectangle in rectangles] == ["ours", "other"]
    assert widths[0] == pytest.approx(4 * widths[1], rel=0.01)
    assert "other & sons" in [element.text for element in root.iter(f"{SVG}text")]


def test_ranges_place_their_dots_by_logarithm_within_the_picture() -> None:
    picture = ranges("delays", [("pgoutbox", [1.0, 10.0, 100.0]), ("empty", [])], unit="ms")
    root = ET.fromstring(picture)

    xs = [float(circle.attrib["cx"]) for circle in root.findall(f"{SVG}circle")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert max(xs) <= float(root.attrib["width"])
    assert "prefers-color-scheme: dark" in picture


@pytest.mark.parametrize(
    ("value", "shown"),
    [(41_234.5, "41,200"), (999.6, "1,000"), (0.01234, "0.0123"), (1000, "1,000"), (float("nan"), "-")],
)
def test_numbers_have_three_significant_digits(value: float, shown: str) -> None:
    assert number(value) == shown
