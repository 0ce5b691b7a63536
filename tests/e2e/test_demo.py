"""``evenhand demo`` as a user runs it, cut short."""

import asyncio
from pathlib import Path

import pytest
from tests.fixtures.command import CommandProcess

from evenhand.cli import main

PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = pytest.mark.timeout(240)


async def test_it_ends_by_itself_with_a_summary_and_a_chart(tmp_path: Path) -> None:
    options = ("--seconds", "2", "--policies", "evenhand", "--chart", "chart.png")
    async with CommandProcess("demo", *options, cwd=tmp_path) as command:
        await command.says("s left")
        family = "\n".join(command.note_family())
        assert all(
            part in family for part in ("postgres", "broker", "scheduler", "state", "worker-edge", "engine")
        )
        assert await command.ends(90) == 0
        await command.leaves_nothing()
    chart = tmp_path / "chart.png"
    assert f"chart: {chart}" in command.said.replace("\n", "")
    assert chart.read_bytes().startswith(PNG)
    summary = command.said.rpartition("chart:")[0]
    for name in ("evenhand", "flood", "chat", "cold"):
        assert name in summary
    assert "Traceback" not in command.said
    assert [path.name for path in tmp_path.iterdir()] == ["chart.png"], "it leaves its chart and nothing else"


@pytest.mark.parametrize("moment", ["while it starts", "under load"])
async def test_ctrl_c_stops_everything(tmp_path: Path, moment: str) -> None:
    options = ("--seconds", "60", "--policies", "evenhand", "--chart", "chart.png")
    async with CommandProcess("demo", *options, cwd=tmp_path) as command:
        if moment == "under load":
            await command.says("s left")
        else:
            await command.says("starting")
            async with asyncio.timeout(60):
                while not any("postgres" in line for line in command.note_family()):
                    await asyncio.sleep(0.01)
        command.interrupt()
        assert await command.ends() == 130
        await command.leaves_nothing()
    assert "stopped; nothing is left running." in command.said
    assert "Traceback" not in command.said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--policies", "evenhand,fastest"),
            "There is no policy 'fastest'; the policies are evenhand, round-robin",
        ),
        (("--policies", ""), "There is no policy ''"),
        (("--seconds", "0"), "--seconds must lie between 1 and 3600, not 0"),
        (("--seconds", "soon"), "--seconds"),
        (("--workload", "all"), "--workload"),
        (("--chart", "absent/chart.png"), "The chart cannot be saved as absent/chart.png"),
        (("--unheard-of",), "--unheard-of"),
    ],
)
def test_a_wrong_option_is_named(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], sentence: str
) -> None:
    try:
        code = main(["demo", *options])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    assert code in (1, 2)
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("evenhand demo: ")
    assert sentence in told
