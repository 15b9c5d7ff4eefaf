//! Every public function that may block says for how long at most, as a formula of options, and what
//! ends it sooner.

use std::fs;
use std::path::{Path, PathBuf};

/// Functions that may fail and never wait: nobody is asked.
const NEVER_WAIT: [&str; 9] = [
    "normalize_and_validate_key",
    "make_storage_key",
    "make_fence_key",
    "validate_lock_id",
    "following",
    "generate_lock_id",
    "validate_ttl",
    "namespaced",
    "check",
];

/// A test's hands on a backend that keeps everything in memory.
const IN_MEMORY: &str = "memory/control.rs";

/// Functions that wait and cannot fail.
const WAITS: [&str; 4] = ["wait_timeout", "flush", "wait_for_answers", "wait_for_calls"];

/// What a bound is made of.
const OPTIONS: [&str; 6] =
    ["`operation_timeout`", "`timeout`", "`dispose_timeout`", "`deadline`", "`limit`", "`lock_timeout`"];

fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("the sources are there") {
        let path = entry.expect("it can be read").path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            into.push(path);
        }
    }
}

/// The functions in this text that may block and do not say how long, and how many there are that may.
fn wanting(text: &str, in_memory: bool) -> (Vec<String>, usize) {
    let lines: Vec<&str> = text.split("#[cfg(test)]\n").next().unwrap_or_default().lines().collect();
    let (mut wanting, mut all) = (Vec::new(), 0);
    for (at, line) in lines.iter().enumerate() {
        let Some(rest) = line.trim_start().strip_prefix("pub fn ") else { continue };
        let name = rest.split(['(', '<']).next().unwrap_or_default();
        let signature: String =
            lines[at..].iter().copied().take_while(|line| !line.trim().is_empty()).collect();
        let may_fail = signature.split('{').next().is_some_and(|head| head.contains("-> Result<"));
        let may_wait = WAITS.contains(&name) || may_fail && !in_memory && !NEVER_WAIT.contains(&name);
        if !may_wait {
            continue;
        }
        all += 1;
        let said = lines[..at].iter().rev().map(|line| line.trim_start());
        let mut said: Vec<&str> =
            said.take_while(|line| line.starts_with("///") || line.starts_with("#[")).collect();
        said.reverse();
        let part = |heading: &str| -> Option<String> {
            let from = said.iter().position(|line| *line == format!("/// # {heading}"))?;
            let lines = said[from + 1..].iter().take_while(|line| !line.starts_with("/// # "));
            Some(lines.copied().collect::<Vec<_>>().join(" "))
        };
        let bound = part("Blocking").is_some_and(|text| OPTIONS.iter().any(|option| text.contains(option)));
        if !bound || part("Cancellation").is_none() {
            wanting.push(name.to_owned());
        }
    }
    (wanting, all)
}

#[test]
fn every_public_function_that_may_block_gives_its_bound_as_a_formula_of_options() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let (mut wrong, mut all) = (Vec::new(), 0);
    for file in files {
        let text = fs::read_to_string(&file).expect("it can be read");
        let (wanting, count) = wanting(&text, file.ends_with(IN_MEMORY));
        all += count;
        wrong.extend(wanting.into_iter().map(|name| format!("{}: {name}", file.display())));
    }
    assert!(wrong.is_empty(), "without `# Blocking` with a formula, or without `# Cancellation`: {wrong:#?}");
    assert!(all > 45, "{all} functions were found: is this still how they are written?");
    let port = fs::read_to_string(src.join("backend/mod.rs")).expect("it can be read");
    let said =
        port.split("pub trait LockBackend").next().and_then(|text| text.rsplit_once("\n\n")).expect("docs").1;
    assert!(said.contains("/// # Blocking") && said.contains("/// # Cancellation"), "{said}");
}

#[test]
fn a_function_that_does_not_say_how_long_it_may_block_is_found() {
    let said = "/// # Blocking\n///\n/// At most `timeout`.\n///\n/// # Cancellation\n///\n/// None.\n";
    let function = "pub fn ask(\n    &self,\n) -> Result<u8> {\n}\n";
    assert_eq!(wanting(&format!("{said}{function}"), false), (vec![], 1));
    for wrong in [
        String::new(),
        said.replace("`timeout`", "a while"),
        said.replace("Blocking", "Errors"),
        said.replace("Cancellation", "Errors"),
        format!("{said}\n"),
    ] {
        assert_eq!(wanting(&format!("{wrong}{function}"), false), (vec!["ask".to_owned()], 1), "{wrong}");
    }
    assert_eq!(wanting("pub fn check(&self) -> Result<()> {\n", false), (vec![], 0));
    assert_eq!(wanting("pub fn flush(&self) -> bool {\n", true), (vec!["flush".to_owned()], 1));
}
