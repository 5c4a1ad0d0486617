"""The file tree of the README, made from the first sentence of every file.

``python -m tests.contracts.tree`` writes it; a contract test fails while it is not what this would write.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- tree: python -m tests.contracts.tree -->\n", "<!-- end of tree -->\n"
FOLDERS = {
    "clients": "what a user imports, and the `ratchet` command; HTTP only",
    "rollout": "records and their judgement; no torch",
    "quant": "ways of running the model, and our own int8 for CPUs",
    "learner": "judged trajectories in, policies out",
    "server": "the gateway; no torch",
    "server/engine": "one vLLM engine: flags, health, HTTP",
    "server/engine/worker": "runs inside vLLM",
    "server/routes": "one resource a file",
    "quant/cpu": "int8 for CPUs, as a plugin of vLLM",
    "tests": "mirrors the packages",
    "tests/fixtures": "real small things, shared by all tests",
    "tests/contracts": "what must stay true of the whole tree",
    "tests/loop": "the whole loop, end to end",
    "tests/bench": "figures, printed by `python -m tests.bench.NAME`",
    "deploy": "deployments, locks, scripts",
}
"""Phrases of folders whose `__init__.py` has no docstring."""
WITHOUT_COMMENTS = {
    "deploy/warm-start": "the first adapter policy, made by `python -m learner sft`",
    "LICENSE": "Apache-2.0",
    "pyproject.toml": "dependencies, entry points, every tool's settings",
}
SKIPPED = {"README.md", ".gitignore"}


def tree() -> str:
    """The tree as it belongs into the README, one line a file or folder."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    entries = {path: phrase(path) for path in paths if str(path) not in SKIPPED}
    for path in paths:
        for folder in path.parents[:-1]:
            entries[folder] = folder_phrase(folder)
    lines = []
    folders = {folder for path in paths for folder in path.parents[:-1]}
    for path in sorted(entries, key=lambda path: (len(path.parts) == 1 and path not in folders, path)):
        if path.name == "__init__.py" or any(str(parent) in WITHOUT_COMMENTS for parent in path.parents):
            continue
        name = f"{path.name}/" if path in folders else path.name
        line = f"{'  ' * (len(path.parts) - 1)}{name}"
        lines.append(f"{line:<34} {entries[path]}".rstrip())
    return "```\n" + "\n".join(lines) + "\n```\n"


def folder_phrase(folder: Path) -> str:
    package = ROOT / folder / "__init__.py"
    stated = WITHOUT_COMMENTS.get(str(folder)) or FOLDERS.get(str(folder))
    return stated or (phrase(package.relative_to(ROOT)) if package.exists() else "")


def phrase(path: Path) -> str:
    """First sentence of the docstring or of the comment at the top."""
    if str(path) in WITHOUT_COMMENTS:
        return WITHOUT_COMMENTS[str(path)]
    if path.suffix in (".safetensors", ".json"):
        return ""
    text = (ROOT / path).read_text()
    if path.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#!")]
    comment = lines[
        : next((i for i, line in enumerate(lines) if not line.startswith(("#", "//", "{#", "/*"))), 0)
    ]
    return first_sentence(" ".join(line.strip("#{}/*- ") for line in comment))


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = paragraph.split(". ")[0]
    return sentence.rstrip(".:")


def write() -> None:
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + BEGIN + tree() + END + after)


if __name__ == "__main__":
    write()
