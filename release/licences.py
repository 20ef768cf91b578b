"""Writes the licences of all crates that the program and the wheel contain: `licences.py TARGET FEATURES`.

A text that several crates have occurs once, after their names. A crate without a file of its own is listed with the licences that
its manifest names.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

# Also of sources in C below a crate's folder.
FILE = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)([-._ ](?!rs$|py$)[^/]*)?", re.IGNORECASE)


def cargo(*arguments: str) -> str:
    return subprocess.run(["cargo", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def linked(target: str, features: str) -> set[tuple[str, str]]:
    """Returns names and versions of the crates that are linked in: neither tests' nor build scripts' dependencies."""
    features = ",".join(f"hydra-bench/{feature}" for feature in features.split(",") if feature)
    tree = cargo(
        *("tree", "--locked", "--package", "hydra-bench", "--package", "hydra-py", "--features", features),
        *("--target", target, "--edges", "normal", "--prefix", "none", "--format", "{p}"),
    )
    crates = (line.split() for line in tree.splitlines() if line)
    return {(name, version.removeprefix("v")) for name, version, *_ in crates}


def main(target: str, features: str) -> None:
    wanted = linked(target, features)
    metadata = json.loads(cargo("metadata", "--locked", "--format-version", "1", "--all-features"))
    # The workspace's own licences are files next to this one.
    crates = [
        package
        for package in metadata["packages"]
        if (package["name"], package["version"]) in wanted and package["id"] not in metadata["workspace_members"]
    ]
    crates.sort(key=lambda package: (package["name"], package["version"]))
    owners: dict[str, list[str]] = {}
    print("Crates that are linked in, and their licences\n")
    for package in crates:
        name = f"{package['name']} {package['version']}"
        files = [path for path in Path(package["manifest_path"]).parent.rglob("*") if FILE.fullmatch(path.name)]
        texts = {path.read_text(encoding="utf-8", errors="replace").strip() for path in files if path.is_file()}
        print(f"{name}: {package['license'] or 'see below'}{'' if texts else ', without a file'}; {package['repository']}")
        for text in sorted(texts):
            owners.setdefault(text, []).append(name)
    print("rust: the standard library: MIT OR Apache-2.0")
    for text, names in sorted(owners.items(), key=lambda item: (-len(item[1]), item[1])):
        print(f"\n{'-' * 78}\n{', '.join(names)}\n{'-' * 78}\n\n{text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
