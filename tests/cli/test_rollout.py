"""`olmorl rollout` refuses what cannot be before it starts an engine."""

from pathlib import Path

import pytest

from olmorl.cli.main import run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
GOOD = {
    "--model": str(QUICKSTART / "model"),
    "--prompts": str(QUICKSTART / "held_out.jsonl"),
    "--out": "{folder}/o.jsonl",
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"--model": "/nowhere"}, "/nowhere"),
        ({"--prompts": "{folder}/none.jsonl"}, "no such data file"),
        ({"--prompts": "{folder}/there.jsonl", "--verifier": "math"}, "there.jsonl:1"),
        ({"--out": "{folder}/o.csv"}, ".jsonl or .parquet"),
        ({"--out": "{folder}/there.jsonl"}, "--resume"),
        ({"--verifier": "maths"}, "'math'"),
        ({"--verifier": "auto"}, "names no verifier"),
        ({"--temperature": "-1"}, "temperature"),
        ({"-n": "0"}, "n is 0"),
        ({"--workers": "0"}, "--workers"),
        ({"--device": "tpu"}, "--device"),
        ({"--no-such": "1"}, "--no-such"),
    ],
)
def test_bad_input(change: dict[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.jsonl").write_text('{"prompt": "1+1="}\n')
    options = [part for pair in (GOOD | change).items() for part in pair]
    before = sorted(tmp_path.iterdir())
    assert run(["rollout", *(option.format(folder=tmp_path) for option in options)]) == 2
    out, err = capsys.readouterr()
    assert says in err and "Traceback" not in err and out == ""
    assert sorted(tmp_path.iterdir()) == before
