"""Many mutants of the library in one build: each function that cargo-mutants would change is written once per change, and
an environment variable says which of them is in force. So a mutant costs a run of the tests, and no build.

usage: one_build.py TREE RESULTS SECONDS CARGO-MUTANTS FILE…

TREE is a copy of the sources, and is changed. RESULTS gets a line per mutant as it is decided: what became of it, and its
name; what stands there already is not run again. What does not build is left out and noted, mutant by mutant. The files'
mutants are run in the order of the files, by the library's own tests, and what survives those by the programs that use it
from outside, until a test fails.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

# A run that takes so long does not end; without a mutant it takes a small part of that. In seconds.
LIMIT = 240
# The second round, over what survives the first; the control of the schedules tests those tests.
SLOW = ["schedules::every", "without_recursion"]
# After the library's own tests those of these programs whose names have one of these words, for files that begin so.
# (Not those that read the sources, which are others here.)
OVER_MEMORY = ["memory", "election", "once", "permits", "several", "telemetry", "values", "whole_locks"]
ON_A_SERVER = ["server_settings", "several_hosts", "schema_setup", "security", "pools", "altered_tables"]
OUTSIDE = [
    ("", "pure", [f"{file}::" for file in OVER_MEMORY] + ["memory_contract::"]),
    ("src/pg/", "it", [f"{file}::" for file in ON_A_SERVER]),
]
# What the library's own tests do not need, and would be built with them.
DEPENDENTS = ("syncguard-contract = ", "syncguard-test-support = ")
QUICK = [word for skipped in ["schedules::", "without_recursion"] for word in ["--skip", skipped]]
NUMBER = """
mod mutants {
    pub(crate) fn number() -> usize {
        static NUMBER: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
        *NUMBER.get_or_init(|| std::env::var("SYNCGUARD_MUTANT").map_or(0, |text| text.parse().unwrap_or(0)))
    }
}
"""


def body_of(text, start, end):
    """Where the body of a function is, with its braces: after its documentation and the brackets of its arguments."""
    depth, comment = 0, False
    for at in range(start, end):
        if comment or text.startswith("//", at):
            comment = text[at] != "\n"
        elif text[at] in "([":
            depth += 1
        elif text[at] in ")]":
            depth -= 1
        elif text[at] == "{" and depth == 0:
            return at, end
    return None


def written(text, mutants):
    """The source with each function in all its forms, and whose lines are whose: of one mutant, or of all of a function."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)

    def places(span):
        return tuple(starts[span[end]["line"] - 1] + span[end]["column"] - 1 for end in ("start", "end"))

    functions = {}
    for number, mutant in mutants:
        functions.setdefault(places(mutant["function"]["span"]), []).append((number, mutant))
    out, at, owners, left_out = "", 0, [], []
    for (start, end), inside in sorted(functions.items()):
        numbers, body = [number for number, _ in inside], body_of(text, start, end)
        # A function within one that is written already.
        if start < at or body is None:
            left_out += numbers
            continue
        out += text[at : body[0]]
        first = out.count("\n") + 1
        out += "{ match crate::mutants::number() {\n"
        for number, mutant in inside:
            a, b = places(mutant["span"])
            line = out.count("\n") + 1
            out += f"{number} => {text[body[0]:a]}{mutant['replacement']}{text[b:body[1]]}\n"
            owners.append((line, out.count("\n"), [number]))
        out += f"_ => {text[body[0]:body[1]]}\n}} }}"
        owners.append((first, out.count("\n") + 1, numbers))
        at = end
    return out + text[at:], owners, left_out


def compiled(tree, *target):
    """The test program, and files and lines of what the compiler does not take."""
    command = ["cargo", "test", "--offline", "--package=syncguard", "--all-features", *target, "--no-run"]
    built = subprocess.run([*command, "--message-format=json"], cwd=tree, capture_output=True, text=True)
    found, program = [], None
    for said in map(json.loads, built.stdout.splitlines()):
        program = said.get("executable") if said.get("profile", {}).get("test") else program
        message = said.get("message")
        if isinstance(message, dict) and message["level"] == "error":
            found += [(span["file_name"], span["line_start"]) for span in message["spans"] if span["is_primary"]]
    if built.returncode and not found:
        sys.exit(built.stderr[-3000:])
    return program, found


def build(tree, left, note):
    """The test program with all mutants of `left` that build; the others are taken out of it."""
    sources = {name: (tree / name).read_text() for name in {mutant["file"] for mutant in left.values()}}
    lib = (tree / "src/lib.rs").read_text()
    (tree / "src/lib.rs").write_text(lib + NUMBER)
    for number in [number for number, mutant in left.items() if not mutant["function"]]:
        note("not in one build", left.pop(number))
    while True:
        owners = {}
        for name, text in sources.items():
            inside = [(number, mutant) for number, mutant in left.items() if mutant["file"] == name]
            changed, owners[name], left_out = written(text, inside)
            (tree / name).write_text(changed)
            for number in left_out:
                note("not in one build", left.pop(number))
        program, found = compiled(tree, "--lib")
        if not found:
            return program
        before = len(left)
        for name, line in found:
            whose = [numbers for first, last, numbers in owners.get(name, []) if first <= line <= last]
            for number in set(whose[0] if whose else []) & set(left):
                note("does not build" if len(whose) > 1 else "not in one build", left.pop(number))
        print(f"{before - len(left)} do not build, {len(left)} left", flush=True)
        if before == len(left):
            sys.exit(f"it does not build: {found[:5]}")


def run(program, number, arguments):
    """The first test that fails; others may wait for long for what does not come."""
    environment = dict(os.environ, SYNCGUARD_MUTANT=str(number))
    tests = [program, *arguments, "--skip", "a_notification_that_is_left_out"]
    child = subprocess.Popen(tests, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    timer = threading.Timer(LIMIT, child.kill)
    timer.start()
    start, failed = time.monotonic(), None
    for line in child.stdout:
        if line.startswith("test ") and line.endswith("... FAILED\n"):
            failed = f"killed by {line.split()[1]}"
            child.kill()
            break
    timer.cancel()
    if child.wait() == 0:
        return None
    return failed or ("does not end" if time.monotonic() - start >= LIMIT else "killed by the whole program")


def main():
    tree, results, seconds, cargo_mutants, *files = sys.argv[1:]
    tree = pathlib.Path(tree)
    known = pathlib.Path(results).read_text().splitlines() if os.path.exists(results) else []
    known = {line.split("\t")[1] for line in known}
    out = open(results, "a")
    mutants = []
    for file in files:
        command = [cargo_mutants, "mutants", "--dir", tree, "--package", "syncguard", "--file", file, "--list", "--json"]
        mutants += json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    left = {number: mutant for number, mutant in enumerate(mutants, 1) if mutant["name"] not in known}
    print(f"{len(mutants)} mutants, {len(left)} of them not decided", flush=True)

    def note(fate, mutant):
        out.write(f"{fate}\t{mutant['name']}\n")
        out.flush()

    def decide(item):
        if time.monotonic() < end:
            # Those of its own module first.
            near = item[1]["file"].split("/")[1].removesuffix(".rs") + "::"
            rounds = [(program, words) for words in ([near, *QUICK], [*QUICK, "--skip", near], SLOW)]
            rounds += [(outside[name], words) for start, name, words in OUTSIDE if item[1]["file"].startswith(start)]
            found = next(filter(None, (run(which, item[0], words) for which, words in rounds)), "SURVIVED")
            note(found, item[1])

    manifest = (tree / "Cargo.toml").read_text()
    alone = [line for line in manifest.splitlines(keepends=True) if not line.startswith(DEPENDENTS)]
    (tree / "Cargo.toml").write_text("".join(alone))
    program = build(tree, left, note)
    (tree / "Cargo.toml").write_text(manifest)
    outside = {name: compiled(tree, "--test", name)[0] for _, name, _ in OUTSIDE}
    for which, words in [(program, QUICK), *((outside[name], words) for _, name, words in OUTSIDE)]:
        if found := run(which, 0, words):
            sys.exit(f"without a mutant: {found}")
    end = time.monotonic() + float(seconds)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(decide, left.items()))


main()
