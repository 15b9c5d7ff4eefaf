//! Every requirement has a proof that exists: requirements.tsv names, for each, the tests that show it
//! or the place in the documents that fulfils it.
//!
//! Proofs are separated by commas. `fences::name` is a test in tests/it/fences.rs,
//! `src/lock/options::name` one in src/lock/options.rs, `cli/waits::name` one of the command, `contract::name` a case that runs on every backend,
//! `docs/errors.md#Patterns` a heading, and `src/diagnostics.rs#words` words of a file's documentation.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says by a panic what it did not expect")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The test programs with a file a subject.
const PROGRAMS: [&str; 7] = ["it", "process", "pure", "faults", "model", "recipes", "tls"];

const TABLE: &str = include_str!("../requirements.tsv");

/// How many requirements there are of each kind, numbered from 1: one that goes missing, or is named
/// wrongly, is noticed.
const COUNTS: [(&str, usize); 38] = [
    ("CAP", 5),
    ("KEY", 15),
    ("STORE", 4),
    ("SCHEMA", 14),
    ("CONF", 9),
    ("TX", 5),
    ("TIME", 11),
    ("FENCE", 20),
    ("ACQ", 14),
    ("REL", 8),
    ("EXT", 6),
    ("ISL", 4),
    ("CLEAN", 7),
    ("LOOK", 10),
    ("DIAG", 5),
    ("TEL", 16),
    ("ERR", 14),
    ("LOCK", 12),
    ("GUARD", 14),
    ("CANCEL", 7),
    ("SEC", 5),
    ("PERF", 5),
    ("TEST", 10),
    ("DOC", 4),
    ("ADV", 32),
    ("TLS", 12),
    ("HA", 4),
    ("CMD", 14),
    ("SHR", 7),
    ("TURN", 5),
    ("SET", 7),
    ("PERMIT", 7),
    ("ELECT", 7),
    ("RUN", 8),
    ("OPS", 7),
    ("WHO", 5),
    ("C", 6),
    ("PY", 1),
];

struct Row {
    id: &'static str,
    proofs: &'static str,
    summary: &'static str,
}

fn rows() -> Vec<Row> {
    let row = |line: &'static str| match line.split('\t').collect::<Vec<_>>().as_slice() {
        [id, proofs, summary] => Row { id, proofs, summary },
        _ => panic!("not three columns: {line}"),
    };
    TABLE.lines().skip(1).map(row).collect()
}

fn read(file: &str) -> Option<String> {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).ok()
}

/// The names of the functions that have `#[test]` before them.
fn tests(text: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut marked = false;
    for line in text.lines().map(str::trim_start) {
        if line.starts_with("#[test]") {
            marked = true;
        } else if let Some(rest) = line.strip_prefix("fn ").filter(|_| marked) {
            found.extend(rest.split('(').next());
            marked = false;
        } else if !line.starts_with("#[") && !line.starts_with("//") {
            marked = false;
        }
    }
    found
}

fn is_heading(line: &str, wanted: &str) -> bool {
    line.starts_with('#') && line.trim_start_matches('#').trim() == wanted
}

fn is_documentation(line: &str, wanted: &str) -> bool {
    let line = line.trim_start();
    (line.starts_with("///") || line.starts_with("//!")) && line.contains(wanted)
}

fn exists(proof: &str) -> bool {
    if let Some((file, wanted)) = proof.split_once('#') {
        let text = read(file).unwrap_or_default();
        let is_rust = Path::new(file).extension().is_some_and(|extension| extension == "rs");
        let found = if is_rust { is_documentation } else { is_heading };
        return !wanted.is_empty() && text.lines().any(|line| found(line, wanted));
    }
    let Some((file, name)) = proof.split_once("::") else { return false };
    if file == "contract" {
        let listed = format!("::{name},");
        let cases = read("contract/src/lib.rs").unwrap_or_default();
        return cases.lines().any(|line| line.trim().ends_with(&listed));
    }
    let files = match (file.strip_prefix("src/"), file.strip_prefix("cli/")) {
        (Some(file), _) => vec![format!("src/{file}.rs")],
        (None, Some(file)) => vec![format!("cli/tests/command/{file}.rs")],
        (None, None) => PROGRAMS.iter().map(|program| format!("tests/{program}/{file}.rs")).collect(),
    };
    files.iter().filter_map(|file| read(file)).any(|text| tests(&text).contains(name))
}

#[test]
fn every_requirement_is_listed_once_in_words() {
    let kinds = COUNTS.iter();
    let expected: BTreeSet<String> =
        kinds.flat_map(|(kind, count)| (1..=*count).map(move |n| format!("{kind}-{n:02}"))).collect();
    let rows = rows();
    assert_eq!(rows.len(), expected.len(), "an id is there twice, or one is missing");
    assert_eq!(rows.iter().map(|row| row.id.to_owned()).collect::<BTreeSet<_>>(), expected);
    for row in rows {
        assert!(!row.summary.trim().is_empty(), "{}", row.id);
    }
}

#[test]
fn every_proof_exists() {
    let mut missing = Vec::new();
    for row in rows() {
        for proof in row.proofs.split(", ") {
            if !exists(proof) {
                missing.push(format!("{}: {proof}", row.id));
            }
        }
    }
    assert!(missing.is_empty(), "\n{}\n", missing.join("\n"));
}

#[test]
fn a_proof_that_is_not_there_is_found() {
    for proof in [
        "",
        "fences",
        "fences::no_such_test",
        "no_such_file::a_test",
        "contract::no_such_case",
        "requirements::exists",
        "docs/errors.md#",
        "docs/errors.md#No such heading",
        "docs/no-such-file.md#Patterns",
        "src/diagnostics.rs#pub fn owns",
    ] {
        assert!(!exists(proof), "{proof}");
    }
    for proof in [
        "requirements::every_proof_exists",
        "contract::release_works_once",
        "docs/errors.md#Patterns",
        "src/diagnostics.rs#Check-then-act",
    ] {
        assert!(exists(proof), "{proof}");
    }
}
