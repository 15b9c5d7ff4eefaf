//! Of every public function that may block it is said for how long at most, as a formula of options, and
//! what ends it sooner: once for its type or its module, and at itself where it differs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Functions that may fail and never wait: nobody is asked.
const NEVER_WAIT: [&str; 10] = [
    "normalize_and_validate_key",
    "make_storage_key",
    "make_fence_key",
    "validate_lock_id",
    "following",
    "generate_lock_id",
    "generate_shared_lock_id",
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

/// More would say the same thing again.
const MOST_SECTIONS: usize = 45;

/// The lines of documentation right above a line.
fn above<'a>(lines: &[&'a str], at: usize) -> Vec<&'a str> {
    let said = lines[..at].iter().rev().map(|line| line.trim_start());
    let mut said: Vec<&str> =
        said.take_while(|line| line.starts_with("///") || line.starts_with("#[")).collect();
    said.reverse();
    said
}

/// What stands under a heading, if it is there.
fn part(docs: &[&str], heading: &str) -> Option<String> {
    let text = |line: &&str| line.trim_start_matches(['/', '!']).trim().to_owned();
    let from = docs.iter().position(|line| text(line) == format!("# {heading}"))?;
    let lines = docs[from + 1..].iter().map(text).take_while(|line| !line.starts_with("# "));
    Some(lines.collect::<Vec<_>>().join(" ").trim().to_owned())
}

fn is_bound(text: &str) -> bool {
    OPTIONS.iter().any(|option| text.contains(option))
}

/// What is said of all methods of a type, by its name; bound, and what ends it sooner.
type Types = BTreeMap<String, (bool, bool)>;

fn learn(text: &str, types: &mut Types) {
    let lines: Vec<&str> = text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let Some(rest) = line.strip_prefix("pub struct ") else { continue };
        let name = rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        let docs = above(&lines, at);
        let bound = part(&docs, "Blocking").is_some_and(|text| is_bound(&text));
        types.insert(name.to_owned(), (bound, part(&docs, "Cancellation").is_some()));
    }
}

/// The functions in this text that may block and of which nobody says how long, and how many there are that may.
fn wanting(text: &str, in_memory: bool, types: &Types) -> (Vec<String>, usize) {
    let lines: Vec<&str> = text.split("#[cfg(test)]\n").next().unwrap_or_default().lines().collect();
    let (mut wanting, mut all) = (Vec::new(), 0);
    let module: Vec<&str> = lines.iter().copied().take_while(|line| line.starts_with("//!")).collect();
    let module = (
        part(&module, "Blocking").is_some_and(|text| is_bound(&text)),
        part(&module, "Cancellation").is_some(),
    );
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
        let said = above(&lines, at);
        let (bound, ends) = if line.starts_with("pub fn ") {
            module
        } else {
            let implementation = lines[..at].iter().rev().find_map(|line| line.strip_prefix("impl"));
            let words = implementation.unwrap_or_default().split(|c: char| !c.is_alphanumeric());
            words.filter_map(|word| types.get(word)).next_back().copied().unwrap_or_default()
        };
        let bound = part(&said, "Blocking").map_or(bound, |text| is_bound(&text));
        if !bound || !(ends || part(&said, "Cancellation").is_some()) {
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
    let mut types = Types::new();
    for file in &files {
        learn(&fs::read_to_string(file).expect("it can be read"), &mut types);
    }
    assert!(types.len() > 30 && types["PgLockClient"] == (true, true), "{types:?}");
    let (mut wrong, mut all) = (Vec::new(), 0);
    for file in files {
        let text = fs::read_to_string(&file).expect("it can be read");
        let (wanting, count) = wanting(&text, file.ends_with(IN_MEMORY), &types);
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

/// Sections that say nothing. What looks like a heading inside of an example is none.
fn empty_sections(text: &str) -> Vec<String> {
    let mut code = false;
    let mut lines = Vec::new();
    for line in text.lines().map(str::trim_start) {
        code ^= line.starts_with("/// ```") || line.starts_with("//! ```");
        lines.push(if code && line.starts_with("//") { "/// code" } else { line });
    }
    let is_heading = |line: &str| line.starts_with("/// # ") || line.starts_with("//! # ");
    let body = |at: usize| {
        let rest = lines[at + 1..].iter().take_while(|line| line.starts_with("//") && !is_heading(line));
        rest.map(|line| line.trim_start_matches(['/', '!']).trim()).find(|line| !line.is_empty())
    };
    (0..lines.len())
        .filter(|at| is_heading(lines[*at]) && body(*at).is_none_or(|first| first.starts_with("None")))
        .map(|at| format!("{}: {}", at + 1, lines[at]))
        .collect()
}

#[test]
fn what_is_said_of_blocking_is_said_once_and_no_section_is_empty() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let (mut sections, mut empty) = (0, Vec::new());
    for file in files {
        let text = fs::read_to_string(&file).expect("it can be read");
        let heading = |line: &&str| line.trim_start_matches([' ', '/', '!']) == "# Blocking";
        sections += text.lines().filter(heading).count();
        empty.extend(empty_sections(&text).into_iter().map(|at| format!("{}:{at}", file.display())));
    }
    assert!(sections > 5 && sections <= MOST_SECTIONS, "{sections} sections named Blocking");
    assert!(empty.is_empty(), "{empty:#?}");
    let text = "/// # Cancellation\n///\n/// None.\n///\n/// # Errors\n///\n/// Two.\n//! # Blocking\n";
    assert_eq!(empty_sections(text).len(), 2);
}

#[test]
fn a_function_that_does_not_say_how_long_it_may_block_is_found() {
    let types = Types::from([("Some".to_owned(), (true, true)), ("Half".to_owned(), (true, false))]);
    let wanting = |text: &str, in_memory| wanting(text, in_memory, &types);
    let method = |of: &str| format!("impl {of} {{\n    pub fn ask(&self) -> Result<u8> {{\n");
    for (of, found) in
        [("Some", 0), ("fmt::Debug for Some", 0), ("<B> Some<B>", 0), ("Half", 1), ("Other", 1)]
    {
        assert_eq!(wanting(&method(of), false).0.len(), found, "{of}");
    }
    let vague = method("Some").replace("    pub", "    /// # Blocking\n    ///\n    /// A while.\n    pub");
    assert_eq!(wanting(&vague, false).0, ["ask"]);
    let module = "//! # Blocking\n//!\n//! At most `timeout`.\n//!\n//! # Cancellation\n//!\n//! No.\n";
    assert_eq!(wanting(&format!("{module}pub fn ask() -> Result<u8> {{\n"), false), (vec![], 1));
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
