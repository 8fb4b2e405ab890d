"""The files of launch/ as far as they can be checked without a cloud: linted, and every field known to who reads it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from olmorl.config.load import load_config

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
TYPES = json.loads(Path(__file__).with_name("kuberay_fields.json").read_text())
LEAVES: dict[str, Any] = {"str": str, "int": int, "number": (int, float), "bool": bool, "map": dict}


def linter(name: str) -> str:
    """It comes with the development packages."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}") or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


def assert_clean(command: list[str], script: str | None = None) -> None:
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_scripts() -> None:
    assert_clean([linter("shellcheck"), *map(str, [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])])


def test_the_local_script_asks_doctor_about_the_run_that_it_starts(tmp_path: Path) -> None:
    """With the settings laid over the file, which may mend or break it; what doctor refuses is not started."""
    fake = tmp_path / "olmorl"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n! echo "$@" | grep -q "doctor.*bad"\n')
    fake.chmod(0o755)

    def run(*arguments: str) -> int:
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run([LAUNCH / "local.sh", *arguments], env=path, capture_output=True).returncode

    assert run() != 0 and not (tmp_path / "said").exists()
    assert run("c.toml", "run.name=x") == 0 and run("c.toml", "run.name=bad") != 0
    said = (tmp_path / "said").read_text().splitlines()
    assert said == ["doctor c.toml run.name=x", "train c.toml run.name=x --resume", "doctor c.toml run.name=bad"]


def test_shell_inside_the_skypilot_task() -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        assert_clean([linter("shellcheck"), "--shell=bash", "-"], task[part])


def test_dockerfile() -> None:
    assert_clean([linter("hadolint"), str(LAUNCH / "Dockerfile")])
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1].isdigit() and users[-1] != "0", "Kubernetes' runAsNonRoot wants a number, and not root's"


def check(value: Any, kind: Any, where: str) -> None:
    if isinstance(kind, list):
        assert isinstance(value, list), f"{where} is no list"
        for index, item in enumerate(value):
            check(item, kind[0], f"{where}[{index}]")
    elif kind == "strings":
        assert isinstance(value, dict) and all(isinstance(item, str) for item in value.values()), where
    elif kind in LEAVES:
        assert isinstance(value, LEAVES[kind]), f"{where} = {value!r} is no {kind}"
    else:
        assert isinstance(value, dict), f"{where} is no {kind}"
        for name, item in value.items():
            assert name in TYPES[kind], f"{where} has no field {name!r}"
            check(item, TYPES[kind][name], f"{where}.{name}")


def kuberay_documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / "kuberay.yaml").read_text()))


def test_kuberay_fields() -> None:
    documents = kuberay_documents()
    assert [document["kind"] for document in documents] == ["RayJob", "RayCluster"]
    for document in documents:
        assert document["apiVersion"] == "ray.io/v1"
        check(document, document["kind"], document["kind"])
    job = kuberay_documents()[0]
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(AssertionError, match=r"workerGroupSpecs\[0\] has no field 'minReplica'"):
        check(job, "RayJob", "RayJob")


def test_kuberay_is_closed_to_the_outside() -> None:
    for document in kuberay_documents():
        spec = document["spec"].get("rayClusterSpec", document["spec"])
        assert spec["authOptions"] == {"mode": "token"}
        assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
        assert spec["rayVersion"] == pinned("ray")


def pinned(package: str) -> str:
    found = re.search(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_ray_accepts_the_cluster_file() -> None:
    """Against the schema that Ray's own launcher checks a file with."""
    import ray

    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load((LAUNCH / "ray_cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]
    starts = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    assert all("RAY_AUTH_MODE=token" in command for command in starts if "ray start" in command)


@pytest.mark.parametrize(
    "file", sorted(path for path in LAUNCH.iterdir() if path.is_file()), ids=lambda path: path.name
)
def test_what_is_set_by_a_launcher_is_a_setting(file: Path, tmp_path: Path) -> None:
    """Every section.key=value handed to `olmorl train` is known; a value that a shell fills in is a number here."""
    text = file.read_text()
    found = re.findall(r"\b((?:run|cluster|inference|learner)\.[a-z_]+)=([^\s\"]*)", text)
    settings = [f"{key}={'2' if '$' in value or not value else value}" for key, value in found]
    load_config(ROOT / "configs" / "quickstart.toml", settings)
    if file.suffix in (".sbatch", ".yaml") and "olmorl train" in text and file.name != "ray_cluster.yaml":
        assert any(key == "cluster.nodes" for key, _ in found), "it does not wait for its nodes"


def test_no_secret_is_written_down() -> None:
    for file in LAUNCH.iterdir():
        if file.is_file():
            assert not re.search(r"(hf_|sk-|AKIA)[A-Za-z0-9]{16,}", file.read_text()), file
